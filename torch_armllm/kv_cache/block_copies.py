"""Copies of whole blocks, within a cache and from or to swap memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torch_armllm.kv_cache.shapes import Cache

_Pairs = Sequence[tuple[int, int]]


def copy_blocks(
    cache: Cache, swap: Cache | None, swaps_out: _Pairs, swaps_in: _Pairs, copies: _Pairs
) -> None:
    """Copies blocks of all layers: to swap memory, then from it, then within the cache.

    Args:
        cache: tensors of the cache.
        swap: tensors of swap memory; None: there is none.
        swaps_out: (block, swap block) pairs.
        swaps_in: (swap block, block) pairs.
        copies: (block, block) pairs.
    """
    if swaps_out:
        assert swap is not None
        _copy(cache, swap, swaps_out)
    if swaps_in:
        assert swap is not None
        _copy(swap, cache, swaps_in)
    if copies:
        _copy(cache, cache, copies)


def _copy(source: Iterable[Tensor | None], target: Iterable[Tensor | None], pairs: _Pairs) -> None:
    sources, targets = torch.tensor(pairs, dtype=torch.int64).unbind(1)
    for old, new in zip(source, target, strict=True):
        if old is not None and new is not None:
            new.index_copy_(1, targets, old.index_select(1, sources))
