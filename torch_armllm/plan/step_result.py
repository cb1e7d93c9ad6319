"""The result of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from array import array


class StepResult(NamedTuple):
    """Logits of a step, with the most probable tokens if they were computed."""

    logits: Tensor
    """``(R, vocab_size)``, in the model's dtype; of a tensor parallel rank its own where ``best`` is known"""
    best: array[int] | None = None
    """R most probable tokens, as by `torch_armllm.ops.sample.best_tokens`; None: not computed"""
    hidden: Tensor | None = None
    """``(T, columns)``: what a drafter reads of every token; None if no drafter does"""
