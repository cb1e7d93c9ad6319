"""Logits of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from array import array


class StepResult(NamedTuple):
    """What a step has computed."""

    logits: Tensor
    """``(R, vocabulary)``, in the model's type"""
    best: array[int] | None = None
    """R of them, by `torch_armllm.ops.sample.best_tokens`; None: they were not looked for"""
