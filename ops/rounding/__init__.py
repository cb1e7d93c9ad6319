"""Rounding of weights: the search for steps with the least squared error."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.ops.declare import op
from torch_armllm.ops.rounding.reference import reference_search_steps

__all__ = ["reference_search_steps", "search_steps"]


@op(lambda a: a.values.new_empty(a.values.shape[:2], dtype=torch.int32))
def search_steps(
    values: Tensor, steps: Tensor, zeros: Tensor, factors: Tensor | None, lowest: int, highest: int
) -> Tensor:
    """Finds for each group of weights the step and the zero point with the least squared error.

    A weight becomes ``step · q`` with the nearest q for which q and the zero point add up to ``lowest`` …
    ``highest``.  Runs on the calling thread, so that threads can quantize different rows.

    Args:
        values: weights ``(rows, groups, size)`` float32.
        steps: ``(candidates, rows, groups)`` float32.
        zeros: ``(candidates, rows, groups)`` float32, the zero point of each step: whole numbers.
        factors: ``(groups, size)`` float32, factors of the errors before they are squared; None: 1.
        lowest: least sum of an integer and its zero point, at least −2^20.
        highest: largest sum, at most 2^20.

    Returns:
        int32 ``(rows, groups)``: the first candidate with the least error; −1 if no error is finite.  The
        same on every kernel variant.

    Raises:
        RuntimeError: a shape, dtype or range is wrong; the message names it.
    """
