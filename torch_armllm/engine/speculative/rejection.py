"""Rejection sampling of draft tokens: the output keeps the distribution of the target model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

DRAFT, ACCEPT, RESAMPLE = 1, 2, 3
"""Purposes of random numbers: to draft a token, to accept it, to resample it."""


def accept(
    draft: Sequence[int],
    proposed: Tensor,
    target: Tensor,
    uniform: Callable[[int, bool], float],
) -> tuple[int, int | None]:
    """Accepts draft tokens by rejection sampling (Leviathan et al., arXiv 2211.17192).

    A token drafted with probability q is accepted with probability min(1, p / q).  At the first rejection,
    another token is sampled from the normalized excess max(0, p - q).

    Args:
        draft: k tokens.
        proposed: float32 ``(k, V)``, the draft probabilities q.
        target: float32 ``(k, V)`` or more rows, the target probabilities p.
        uniform: random numbers in 0 … 1 by position: to accept its token, or, with True, to resample it.

    Returns:
        The number of accepted tokens, and the token that replaces the next one; None if all are accepted.
    """
    for position, token in enumerate(draft):
        p, q = target[position], proposed[position]
        if uniform(position, False) * float(q[token]) < float(p[token]):
            continue
        excess = (p - q).clamp_(min=0).double().cumsum(0)
        if not excess[-1] > 0:  # p and q differ by rounding only
            excess = p.double().cumsum(0)
        at = excess[-1] * uniform(position, True)
        return position, min(int(torch.searchsorted(excess, at, right=True)), excess.numel() - 1)
    return len(draft), None
