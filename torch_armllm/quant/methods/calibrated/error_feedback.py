"""Rounding the weights of a row one after the other, each making up for what those before it left.

GPTQ (arXiv 2210.17323) in the form of Babai's nearest plane (arXiv 2507.18553): with H = UᵀU, U upper, the
error (w − ŵ) H (w − ŵ)ᵀ is the sum over i of (Σ_{j ≥ i} U_ij (ŵ_j − w_j))².  Going from the last column to
the first, each term has one unknown left, and rounding makes it small.  No inverse of H is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.quant.methods.calibrated.value_grid import inverse

_BLOCK = 128


def round_with_feedback(
    target: Tensor, upper: Tensor, step: Tensor, low: Tensor, high: Tensor, block: int = _BLOCK
) -> Tensor:
    """Rounds columns from the last to the first.

    Args:
        target: float32 (K, N), what is to be rounded; a column of weights is a row of it.
        upper: float32 (K, K), the upper Cholesky factor of H, each row over its diagonal: see `unit_rows`.
        step: float32 (K, N).
        low: (K, N) or (K, 1), the least integers.
        high: likewise the largest.
        block: columns whose corrections are brought to the others at once.

    Returns:
        The rounded values, float32 (K, N).
    """
    values, moved = torch.empty_like(target), torch.zeros_like(target)
    # lists of rows: an element of a tensor takes as long to name as to compute with
    into, away, wishes, shrink = values.unbind(), moved.unbind(), target.unbind(), inverse(step).unbind()
    steps, lows, highs = step.unbind(), low.unbind(), high.unbind()
    for end in range(len(target), 0, -block):
        begin = max(end - block, 0)
        wanted = (
            target[begin:end] - upper[begin:end, end:] @ moved[end:]
            if end < len(target)
            else target[begin:end].clone()
        )
        pulls = upper[begin:end, begin:end].t().contiguous()
        for j in range(end - 1, begin - 1, -1):
            own = j - begin
            torch.mul(wanted[own], shrink[j], out=into[j])
            into[j].round_().clamp_(lows[j], highs[j]).mul_(steps[j])
            torch.sub(into[j], wishes[j], out=away[j])
            if own:
                wanted[:own].addr_(pulls[own, :own], away[j], alpha=-1)
    return values


def unit_rows(upper: Tensor) -> Tensor:
    """An upper triangle (K, K) with ones on its diagonal: each row over what it has there."""
    return upper / upper.diagonal()[:, None]
