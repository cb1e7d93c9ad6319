"""Statistics against values computed by hand."""

from __future__ import annotations

import math

import pytest

from torch_armllm.evaluation.paired_tests import difference, mcnemar, mean, weighted


def test_mean_and_its_error() -> None:
    # squares about 0.6: 3 · 0.16 + 2 · 0.36 = 1.2, over 4 is 0.3, over 5 is 0.06
    assert mean([1, 1, 1, 0, 0]) == pytest.approx((0.6, math.sqrt(0.06)))


def test_error_of_one_value_is_unknown() -> None:
    assert mean([3.0]).value == 3.0
    assert math.isnan(mean([3.0]).stderr)


def test_difference_counts_by_row() -> None:
    # −1, 0, 0, 1, −1: mean −0.2, squares about it 0.64 + 0.04 + 0.04 + 1.44 + 0.64 = 2.8
    found = difference([1, 1, 0, 0, 1], [0, 1, 0, 1, 0])
    assert found == pytest.approx((-0.2, math.sqrt(2.8 / 4 / 5)))


def test_equal_runs_have_no_difference() -> None:
    assert difference([1, 0, 1], [1, 0, 1]) == (0.0, 0.0)


def test_ratio_of_sums() -> None:
    # ratio 6 / 12; residuals 1 − 2 · 0.5 = 0, 2 − 0.5 · 6 = −1, 3 − 0.5 · 4 = 1; √(2 · 3 / 2) / 12
    assert weighted([(1, 2), (2, 6), (3, 4)]) == pytest.approx((0.5, math.sqrt(3) / 12))


@pytest.mark.parametrize(
    "worse,better,p",
    [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 2 / 32), (0, 5, 2 / 32), (7, 2, 2 * (1 + 9 + 36) / 512), (3, 3, 1.0)],
)
def test_mcnemar(worse: int, better: int, p: float) -> None:
    a = [1.0] * worse + [0.0] * better + [1.0, 0.0]
    b = [0.0] * worse + [1.0] * better + [1.0, 0.0]
    assert mcnemar(a, b) == pytest.approx(p)
