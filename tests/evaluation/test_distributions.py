"""Divergences of distributions against values computed by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torch_armllm.evaluation.distributions import BaselineLogits, LogitComparison


def _logits(*rows: list[float]) -> Tensor:
    return torch.tensor(rows).log()


def _compare(file: Path, base: Tensor, other: Tensor, most: int = 100) -> dict[str, float]:
    reference = BaselineLogits(file, most)
    for row in base.split(2):  # in other pieces than the comparison
        reference.add(row)
    known = reference.result()
    comparison = LogitComparison(file, known["dtype"])
    for row in other.split(3):
        comparison.add(row)
    return comparison.result()


def test_divergence_and_agreement(tmp_path: Path) -> None:
    base = _logits([0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6], [1, 1, 2])
    other = _logits([0.25, 0.5, 0.25], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6], [1, 1, 2])
    found = _compare(tmp_path / "x", base, other + 3.0)  # a constant does not change the distribution
    one = 0.5 * math.log(2) - 0.25 * math.log(2)
    assert found["tokens"] == 4
    assert found["kl"] == pytest.approx(one / 4, abs=1e-6)
    assert found["kl_stderr"] == pytest.approx(one / 4, rel=1e-4)  # one of four: sd is half of it
    assert found["agreement"] == 0.75


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_agrees_with_itself(tmp_path: Path, dtype: torch.dtype) -> None:
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = _compare(tmp_path / "x", logits, logits)
    assert (found["tokens"], found["agreement"]) == (9, 1.0)
    assert found["kl"] == 0.0


def test_only_the_first_positions_count(tmp_path: Path) -> None:
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(0))
    found = _compare(tmp_path / "x", logits, logits.roll(1, 0), most=5)
    assert found["tokens"] == 5 and found["kl"] > 0
