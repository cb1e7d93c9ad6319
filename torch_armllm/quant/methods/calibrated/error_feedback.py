"""Rounding with error feedback: each weight of a row compensates the errors of those rounded before it.

GPTQ (arXiv 2210.17323) in the form of Babai's nearest plane (arXiv 2507.18553): with H = UᵀU, U upper, the
error (w − ŵ) H (w − ŵ)ᵀ is the sum over i of (Σ_{j ≥ i} U_ij (ŵ_j − w_j))².  From the last column to the
first, each term has one unknown left, and rounding makes it small.  No inverse of H is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.quant.schemes.scale_search import inverse

_BLOCK = 128


def round_with_feedback(
    target: Tensor, upper: Tensor, step: Tensor, low: Tensor, high: Tensor, block: int = _BLOCK
) -> Tensor:
    """Rounds columns from the last to the first.

    Args:
        target: float32 (K, N), the weights to round, transposed: a column of weights is a row here.
        upper: float32 (K, K), the upper Cholesky factor of H, each row over its diagonal: see `unit_rows`.
        step: float32 (K, N).
        low: (K, N) or (K, 1), the smallest integers.
        high: (K, N) or (K, 1), the largest integers.
        block: columns whose errors are fed back to the remaining columns together.

    Returns:
        The rounded values, float32 (K, N).
    """
    values, errors = torch.empty_like(target), torch.zeros_like(target)
    # lists of rows: indexing a tensor costs as much as computing with the row
    rounded, error, targets = values.unbind(), errors.unbind(), target.unbind()
    inverse_steps, steps, lows, highs = inverse(step).unbind(), step.unbind(), low.unbind(), high.unbind()
    for end in range(len(target), 0, -block):
        begin = max(end - block, 0)
        corrected = (
            target[begin:end] - upper[begin:end, end:] @ errors[end:]
            if end < len(target)
            else target[begin:end].clone()
        )
        coupling = upper[begin:end, begin:end].t().contiguous()
        for j in range(end - 1, begin - 1, -1):
            i = j - begin
            torch.mul(corrected[i], inverse_steps[j], out=rounded[j])
            rounded[j].round_().clamp_(lows[j], highs[j]).mul_(steps[j])
            torch.sub(rounded[j], targets[j], out=error[j])
            if i:
                corrected[:i].addr_(coupling[i, :i], error[j], alpha=-1)
    return values


def unit_rows(upper: Tensor) -> Tensor:
    """Divides each row of an upper triangle (K, K) by its diagonal element."""
    return upper / upper.diagonal()[:, None]
