"""Attention masks that models give to their language models, compared with what plans compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_WINDOWS = "sliding_attention"


def is_mask_of(
    mask: Any,
    tokens: int,
    spans: list[tuple[int, int]],
    window: int | None,
    only_windows: bool = False,
    past_windows: bool = False,
) -> bool:
    """True if tokens attend to the earlier ones, and to those of their item.

    Args:
        mask: None, of padding ``(1, T)``, of pairs of tokens ``(1, 1, T, T)``, or those by kind of layer.
        tokens: their number T.
        spans: first and last position, exclusive, of the tokens of each item that see each other.
        window: of layers with one.
        only_windows: True if the others are causal.
        past_windows: True if windows do not cut into an item.
    """
    if isinstance(mask, dict):
        return all(
            is_mask_of(one, tokens, spans, window, past_windows=past_windows)
            if kind == _WINDOWS
            else is_mask_of(one, tokens, [] if only_windows else spans, None)
            for kind, one in mask.items()
            if one is not None
        )
    if mask is None:
        return not spans
    if not isinstance(mask, Tensor):
        return False
    if mask.dim() == 2:
        return bool(mask.all()) and not spans
    seen = torch.ones(tokens, tokens).tril().bool()
    near = torch.ones(tokens, tokens).triu(1 - window if window is not None else -tokens).bool()
    for first, last in spans:
        seen[first:last, first:last] = True
        if past_windows:
            near[first:last, first:last] = True
    seen &= near
    given = _seen(mask)
    return given.shape == (1, 1, tokens, tokens) and torch.equal(given[0, 0], seen)


def spans_of(mask: Any, tokens: int) -> tuple[list[tuple[int, int]], bool]:
    """Returns first and last position, exclusive, of tokens that attend to later ones, and where they do.

    Args:
        mask: see `is_mask_of`.
        tokens: their number T.

    Returns:
        The spans, and True if layers without windows are causal.
    """
    if isinstance(mask, dict):
        found = {kind: spans_of(one, tokens)[0] for kind, one in mask.items()}
        windows = found.get(_WINDOWS, [])
        others = next((spans for kind, spans in found.items() if kind != _WINDOWS and spans), [])
        return others or windows, bool(windows) and not others
    if not isinstance(mask, Tensor) or mask.shape != (1, 1, tokens, tokens):
        return [], False
    places = torch.arange(tokens)
    ends = (_seen(mask)[0, 0] * (places + 1)).amax(-1)  # behind the last token that each attends to
    spans: list[tuple[int, int]] = []
    at = 0
    while at < tokens:
        end = int(ends[at])
        if end > at + 1:
            spans.append((at, end))
            at = end
        else:
            at += 1
    return spans, False


def _seen(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask == 0
