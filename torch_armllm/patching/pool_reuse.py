"""Reuse of block pools."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch_armllm.kv_cache.block_pool import BlockPool
from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.patching.paged_cache import PagedCache


class PoolReuse:
    """Reuses the block pools of deleted caches for new caches.

    The system zeroes new memory page by page, which takes several percent of the time of a short prompt.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._in_use: list[tuple[weakref.ref[PagedCache], BlockPool]] = []

    def cache(self, make: Callable[[BlockPool], PagedCache]) -> PagedCache:
        """Returns a cache that ``make`` builds on a spare pool, or on a new pool if none is spare."""
        spare = [pool for owner, pool in self._in_use if owner() is None]
        pool = spare[0] if spare else BlockPool(self.shape)
        pool.reset()
        cache = make(pool)
        # one spare pool is enough: the others are dropped
        self._in_use = [(owner, pool) for owner, pool in self._in_use if owner() is not None]
        self._in_use.append((weakref.ref(cache), pool))
        return cache
