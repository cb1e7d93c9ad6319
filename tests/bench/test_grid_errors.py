"""`python -m bench.quality.grid_errors`: squared errors of the schemes' grids."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from bench.quality import grid_errors
from bench.quality.grid_errors import linear_weights, measure, shown
from tests.support.models import tiny
from torch_armllm.quant.schemes.registry import SCHEMES


def test_errors_are_those_of_the_schemes() -> None:
    weights = list(linear_weights(tiny("llama"), None))
    first, other = measure(iter(weights), ["g32i", "int4"])
    assert (first.name, other.name) == ("g32i", "g32iz")
    assert first.weights == sum(weight.numel() for weight in weights)
    for weight, square in zip(weights, other.squares, strict=True):
        error = SCHEMES["g32iz"].quantize(weight)[1]
        assert square == pytest.approx(error**2 * float(weight.square().sum()), rel=1e-4)
    assert sum(other.squares) < sum(first.squares)
    assert "squared, of g32i's" in shown([first, other])


def test_matrices_of_experts_count_and_heads_do_not() -> None:
    model = tiny("mixtral")
    weights = list(linear_weights(model, 16))
    assert all(weight.shape[0] == 16 and weight.dim() == 2 for weight in weights)
    config = model.config
    assert len(weights) == config.num_hidden_layers * (4 + 3 * config.num_local_experts)


def test_command_prints_a_row_for_each_scheme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny("llama", dtype=torch.bfloat16).save_pretrained(tmp_path)
    monkeypatch.setattr(sys, "argv", ["grid_errors", "--start", str(tmp_path), "--schemes", "g32i,row,int8"])
    grid_errors.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["g32i", "row", "int8"]
