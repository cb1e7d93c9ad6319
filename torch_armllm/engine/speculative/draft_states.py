"""States of a draft model's recurrent layers, which go back where drafts were rejected."""

from __future__ import annotations

from torch_armllm.engine.request import Sequence
from torch_armllm.kv_cache.block_allocator import BlockAllocator


class DraftStates:
    """Allocates the state slots of the draft model's sequences.

    Each sequence has a slot of its own, and while it drafts one for the state before each further token.

    Args:
        slots: number of slots.
    """

    def __init__(self, slots: int) -> None:
        self._slots = BlockAllocator(slots)
        self._lengths: dict[Sequence, int] = {}

    @property
    def free(self) -> int:
        """Number of slots that no sequence holds."""
        return self._slots.free

    def begin(self, shadow: Sequence) -> bool:
        """Gives a sequence a slot, if it has none; False if none is free."""
        if shadow.state is None:
            if not self._slots.free:
                return False
            (shadow.state,) = self._slots.allocate(1)
            shadow.computed = self._lengths[shadow] = 0
        return True

    def go_back(self, shadow: Sequence) -> None:
        """Makes the state after the computed tokens the sequence's own; computes all again without it."""
        if shadow.state is None:
            return
        if shadow.computed != self._lengths[shadow]:
            slot = shadow.saves.pop(shadow.computed, None)
            if slot is None:
                shadow.computed = 0
            else:
                self._slots.deallocate([shadow.state])
                shadow.state = slot
        self._lengths[shadow] = shadow.computed
        self._slots.deallocate(list(shadow.saves.values()))
        shadow.saves.clear()

    def advance(self, shadow: Sequence, end: int, save: bool) -> None:
        """Records that a step computes a sequence up to ``end``, and lets it save the state there."""
        self._lengths[shadow] = end
        if save and self._slots.free:
            (shadow.saves[end],) = self._slots.allocate(1)

    def release(self, shadow: Sequence) -> None:
        """Frees all slots of a sequence."""
        if shadow.state is not None:
            self._slots.deallocate([shadow.state, *shadow.saves.values()])
            shadow.state = None
            shadow.saves.clear()
            del self._lengths[shadow]
