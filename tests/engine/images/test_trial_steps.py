"""Comparison of a trial's prompt by a plan with the modules: rounding is no difference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_armllm.engine.images.trial_steps import differs

TOKENS, ITEM = 16, 6


@pytest.fixture
def expected() -> Tensor:
    return torch.randn(TOKENS, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def shown() -> Tensor:
    return torch.arange(TOKENS) < ITEM


def with_errors(expected: Tensor, tokens: slice, size: float) -> Tensor:
    found = expected.clone()
    found[tokens] *= 1 + size
    return found


def test_what_is_close_needs_no_other_rounding(expected: Tensor, shown: Tensor) -> None:
    def never() -> Tensor:
        raise AssertionError("the modules need not run again")

    assert differs(with_errors(expected, slice(None), 0.05), expected, shown, never) is None
    assert differs(with_errors(expected, slice(3), 1e-3), expected, shown, None) is None


def test_other_experts_of_single_tokens_are_rounding(expected: Tensor, shown: Tensor) -> None:
    found = with_errors(expected, slice(2), 1.0)
    assert differs(found, expected, shown, lambda: expected) is None
    assert "relative error" in str(differs(found, expected, shown, None))


@pytest.mark.parametrize("tokens", [slice(ITEM), slice(ITEM, None)], ids=["item", "text"])
def test_errors_of_most_tokens_of_an_item_or_of_the_text_are_none(
    expected: Tensor, shown: Tensor, tokens: slice
) -> None:
    """However much other rounding changes."""
    wild = with_errors(expected, slice(None), 1.0)
    far, near = (with_errors(expected, tokens, size) for size in (0.3, 0.18))
    assert "relative error 0.3" in str(differs(far, expected, shown, lambda: wild))
    assert differs(near, expected, shown, lambda: wild) is None
    assert differs(near, expected, shown, lambda: expected) is not None
