"""Sizes of what an executor of steps keeps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExecutorSizes:
    """Sizes of an executor's caches, the same on all ranks of an engine.

    Attributes:
        num_blocks: blocks of the KV cache.
        swap_blocks: blocks of swap memory.
        state_slots: slots for the states of recurrent layers.
        swap_state_slots: likewise, of swap memory.
        drawable: number of token ids that may be sampled; None: all.
    """

    num_blocks: int
    swap_blocks: int = 0
    state_slots: int = 0
    swap_state_slots: int = 0
    drawable: int | None = None
