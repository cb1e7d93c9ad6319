"""Attributes of modules that are replaced while a context lasts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from torch_armllm.hf.replacements import replaced


class Doubles(nn.Linear):
    """A layer whose instance has a method of its own."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.forward = self.doubled  # type: ignore[method-assign]

    def doubled(self, x: Tensor) -> Tensor:
        return 2 * x


def zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


def test_methods_come_back_after_an_error_too() -> None:
    model, x = nn.Sequential(Doubles(), nn.ReLU()), torch.ones(1, 2)

    def fail() -> None:
        with replaced(model, "forward", lambda m: zeros if m is not model else None):
            assert torch.equal(model(x), zeros(x)) and "forward" in vars(model[1])
            raise KeyError

    pytest.raises(KeyError, fail)
    assert torch.equal(model(x), 2 * x) and "forward" not in vars(model[1])
