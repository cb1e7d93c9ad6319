"""The parts of ``max_memory``: a KV cache, swap space, and what is left for weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch_armllm.system.files import format_bytes
from torch_armllm.system.host import free_memory

if TYPE_CHECKING:
    from torch_armllm.engine.config import EngineConfig

KV_SHARE = 1 / 8
"""Largest fraction of ``max_memory`` for the KV cache, unless ``kv_cache_memory`` is set."""
_CHOSEN_SHARE = 0.9
"""Fraction of the free memory that a model takes that does not fit and has no ``max_memory``."""


class MemoryLimitError(ValueError):
    """A model cannot run within ``max_memory``."""


@dataclass(frozen=True)
class MemoryLimit:
    """Bytes that a model may take.

    Attributes:
        total: for weights, KV cache and swap space.
        kv_cache: bytes that the KV cache may take.
        swap_space: bytes of swap space.
        kv_share: fraction of the total that the KV cache's bytes are; None: they do not depend on it.
        is_chosen: the limit is not the user's, but was chosen because the model does not fit.
    """

    total: int
    kv_cache: int
    swap_space: int
    kv_share: float | None = None
    is_chosen: bool = False

    @property
    def weights(self) -> int:
        """Bytes for weights."""
        return max(0, self.total - self.kv_cache - self.swap_space)

    def check(self, fixed: int, experts: int, free: int) -> None:
        """Checks that a model can run with its experts on disk.

        Args:
            fixed: bytes of the weights that stay in memory.
            experts: bytes of the experts of the largest layer, which a step may need together.
            free: bytes that are free.

        Raises:
            MemoryLimitError: it cannot.
        """
        if fixed + experts > self.weights:
            others = (
                f"{format_bytes(experts)} of experts that one layer may need at once, " if experts else ""
            )
            raise MemoryLimitError(
                f"max_memory = {format_bytes(self.total)} is too little for this model: it needs at least "
                f"{math.ceil(self._needed(fixed + experts) / 1e6)} MB, for {format_bytes(fixed)} of weights "
                f"that stay in memory, {others}and the KV cache"
            )
        if self.total > free:
            raise MemoryLimitError(
                f"max_memory = {format_bytes(self.total)} is more than the {format_bytes(free)} that are "
                "free: ask for less, or for a share such as max_memory=0.8"
            )

    def _needed(self, weights: int) -> float:
        """Returns the least total for so many bytes of weights.

        Raises:
            MemoryLimitError: the KV cache takes all of any total.
        """
        if self.kv_share is None:
            return weights + self.swap_space + self.kv_cache
        if self.kv_share >= 1:
            raise MemoryLimitError("kv_cache_memory = 1.0 leaves nothing of max_memory for weights")
        return (weights + self.swap_space) / (1 - self.kv_share)


def memory_limit(config: EngineConfig) -> MemoryLimit | None:
    """Returns the limit of an engine whose ``max_memory`` is in bytes; None: there is none."""
    total = config.max_memory
    if total is None:
        return None
    given = config.kv_cache_memory
    if given is None:
        share: float | None = KV_SHARE
    else:
        share = given if isinstance(given, float) and 0 < given <= 1 else None
    kv_cache = given if share is None else share * total
    assert kv_cache is not None
    return MemoryLimit(int(total), int(kv_cache), config.swap_space, share)


def with_bytes(config: EngineConfig) -> EngineConfig:
    """Returns the settings with ``max_memory`` in bytes, if it is a fraction of the free memory.

    Raises:
        ValueError: it is neither a fraction nor a number of bytes.
    """
    given = config.max_memory
    if given is None or given > 1:
        return config
    if given <= 0 or isinstance(given, int):
        raise ValueError(f"max_memory is bytes, or a share 0.0 … 1.0 of the free memory, not {given}")
    return replace(config, max_memory=int(given * left(config)))


def chosen(config: EngineConfig) -> tuple[EngineConfig, MemoryLimit]:
    """Returns settings and limit for a model whose weights are larger than the free memory."""
    config = replace(config, max_memory=int(_CHOSEN_SHARE * left(config)))
    limit = memory_limit(config)
    assert limit is not None
    return config, replace(limit, is_chosen=True)


def left(config: EngineConfig) -> int:
    """Returns the bytes that are free and not promised."""
    return max(0, free_memory() - config.promised_memory)
