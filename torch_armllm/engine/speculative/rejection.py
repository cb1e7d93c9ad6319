"""Which drawn guesses may stay, so that what comes out is distributed as if nothing had been guessed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

GUESS, STAY, INSTEAD = 1, 2, 3
"""Purposes of random numbers: to guess a token, to keep it, to draw another one."""


def accept(
    draft: Sequence[int],
    proposed: Tensor,
    target: Tensor,
    uniform: Callable[[int, bool], float],
) -> tuple[int, int | None]:
    """Rejection sampling (Leviathan et al., arXiv 2211.17192).

    A token that the draft model drew with probability q stays with probability min(1, p / q); where one does
    not stay, another is drawn from what p has more than q.

    Args:
        draft: k tokens.
        proposed: float32 ``(k, V)``, the probabilities q with which each was drawn.
        target: float32 ``(k, V)`` or with more rows, the probabilities p with which it should be drawn.
        uniform: random numbers in 0 … 1 for a place: whether its token stays, and (where true is given) which
            one comes instead.

    Returns:
        How many tokens stay, and the one that comes instead of the next; None where all stay.
    """
    for place, token in enumerate(draft):
        p, q = target[place], proposed[place]
        if uniform(place, False) * float(q[token]) < float(p[token]):
            continue
        left = (p - q).clamp_(min=0).double().cumsum(0)
        if not left[-1] > 0:  # they differ by rounding alone
            left = p.double().cumsum(0)
        at = left[-1] * uniform(place, True)
        return place, min(int(torch.searchsorted(left, at, right=True)), left.numel() - 1)
    return len(draft), None
