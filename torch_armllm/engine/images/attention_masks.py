"""Attention masks that models give to their language models, compared with what plans compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_mask_of(
    mask: Any, tokens: int, spans: list[tuple[int, int]], window: int | None, only_windows: bool = False
) -> bool:
    """True if tokens attend to the earlier ones, and to those of their picture.

    Args:
        mask: None, of padding ``(1, T)``, of pairs of tokens ``(1, 1, T, T)``, or those by kind of layer.
        tokens: their number T.
        spans: first and last position, exclusive, of the tokens of each picture that see each other.
        window: of layers with one.
        only_windows: True if the others are causal.
    """
    if isinstance(mask, dict):
        return all(
            is_mask_of(one, tokens, spans, window)
            if kind == "sliding_attention"
            else is_mask_of(one, tokens, [] if only_windows else spans, None)
            for kind, one in mask.items()
        )
    if mask is None:
        return not spans
    if not isinstance(mask, Tensor):
        return False
    if mask.dim() == 2:
        return bool(mask.all()) and not spans
    seen = torch.ones(tokens, tokens).tril().bool()
    for first, last in spans:
        seen[first:last, first:last] = True
    if window is not None:
        seen &= torch.ones(tokens, tokens).triu(1 - window).bool()
    given = mask if mask.dtype == torch.bool else mask == 0
    return given.shape == (1, 1, tokens, tokens) and torch.equal(given[0, 0], seen)
