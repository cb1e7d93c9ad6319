"""Layers with too large a rounding error stop the run before any module changes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import torch_armllm
from tests.support.models import tiny
from torch_armllm import ArmInt4Config, Recipe
from torch_armllm.quant.inplace import quantize
from torch_armllm.quant.outliers import FACTOR, HARMLESS, find_outliers, gaussian_error
from torch_armllm.quant.report import LayerRecord, Report
from torch_armllm.quant.schemes.registry import SCHEMES

HURT = "model.layers.1.mlp.up_proj"


def record(name: str, error: float, scheme: str = "g32iz") -> LayerRecord:
    return LayerRecord(name, "linear", "int4_linear", scheme, 1, 2, 1, error)


def hurt() -> Any:
    """Returns a model with a layer in which rounding loses all but a few weights of each group."""
    model = tiny("llama")
    with torch.no_grad():
        weight = model.get_submodule(HURT).weight
        weight.mul_(0.06 / 0.08)[:, ::32] = 1.0
    return model


@pytest.mark.parametrize("scheme", SCHEMES)
def test_outliers_are_relative_to_gaussian_weights(scheme: str) -> None:
    error = gaussian_error(scheme)
    lowest = {"int6": 0.02, "int5": 0.04}.get(scheme, 0.003 if scheme.startswith("int8") else 0.05)
    assert lowest < error < 0.2
    usual = [record(f"layer{i}", error * (0.7 + 0.05 * i), scheme) for i in range(9)]
    assert find_outliers(usual) == []
    far = record("far", max(FACTOR * 1.1 * error, 1.1 * HARMLESS), scheme)
    (found,) = find_outliers([*usual, far])
    assert found == (far, pytest.approx(error))


def test_uniformly_heavy_tails_are_not_outliers() -> None:
    wide = FACTOR * 1.1 * gaussian_error("row")
    assert len(find_outliers([record("alone", wide, "row")])) == 1
    assert find_outliers([record(f"layer{i}", wide, "row") for i in range(5)]) == []


def test_errors_below_int4_are_not_outliers() -> None:
    assert FACTOR * gaussian_error("int8") < 0.04
    assert find_outliers([record("int8", 0.04, "int8")]) == []


def test_calibrated_layers_may_move_as_far_as_int4_rounds() -> None:
    limit = FACTOR * gaussian_error("g32iz")
    moved = record("int8", 0.9 * limit, "int8")
    assert len(find_outliers([moved])) == 1
    assert find_outliers([moved], calibrated=True) == []
    far = record("int8", 1.1 * limit, "int8")
    assert find_outliers([moved, far], calibrated=True)[0][0] == far


@torch.no_grad()
def test_outlier_raises_and_leaves_the_model_unchanged() -> None:
    model = hurt()
    before = {name: p.clone() for name, p in model.named_parameters()}
    message = (
        rf"{HURT} loses 0\.\d+ of its weights' norm as g32iz, where 0\.0\d+ is usual: nothing was changed\. "
        rf".*overrides={{'{HURT}': \"int8\"}} or ignore=\['{HURT}'\]\), .*allow_outliers=True"
    )
    with pytest.raises(ValueError, match=message):
        torch_armllm.patch(model, Recipe(importance=False), progress=False)
    assert not torch_armllm.is_patched(model)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    quantize(model, Recipe(importance=False, overrides={HURT: "int8"}), progress=False)


def test_outlier_raises_while_loading(tmp_path: Path) -> None:
    hurt().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=re.escape(HURT)):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=ArmInt4Config())
    config = ArmInt4Config(Recipe(allow_outliers=True))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    report = model.hf_quantizer.report
    assert list(report.outliers) == [HURT]
    (line,) = [line for line in str(report).splitlines() if HURT in line]
    assert line.startswith("largest errors ")
    assert "out of line: 0.0" in line


def test_report_lists_the_ten_worst_and_all_unquantized_layers() -> None:
    layers = [record(f"model.layers.{i}.q", i / 100) for i in range(1, 15)]
    left = [
        LayerRecord(f"model.layers.{i}.router", "router", "torch", "bfloat16", 1, 2, 2, None, "it chooses")
        for i in range(14)
    ]
    text = str(Report(layers=[*layers, *left]))
    assert [f"0.{i:02}00  model.layers.{i}.q" in text for i in range(1, 15)] == [False] * 4 + [True] * 10
    assert "left as it was bfloat16: it chooses" in text
    assert "14 x model.layers.*.router" in text
