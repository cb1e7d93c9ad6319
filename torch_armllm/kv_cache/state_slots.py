"""Slots of recurrent layers' states in an engine: of running sequences, of saved states, and checkpoints."""

from __future__ import annotations

from collections import OrderedDict

from torch_armllm.kv_cache.block_allocator import BlockAllocator


class StateSlots(BlockAllocator):
    """Allocator of state slots, whose idle slots hold checkpoints of cached prefixes.

    A checkpoint is the state after a prefix, and is found by the prefix's content number in the prefix
    cache.  It holds no reference: where no slot is free, the checkpoint that was not used for longest gives
    way.  States that a step saves are not checkpoints before the step is computed; there are never more of
    them than spare slots, so that each running sequence finds a slot.

    Args:
        running: sequences that may run at once.
        spare: further slots.

    Attributes:
        spare: most saved states that are not checkpoints yet.
        saved: number of these now.
    """

    def __init__(self, running: int, spare: int = 0) -> None:
        super().__init__(running + spare)
        self.spare = spare
        self.saved = 0
        self._checkpoints: OrderedDict[int, int] = OrderedDict()
        self._numbers = [0] * (running + spare)

    @property
    def free(self) -> int:
        """Number of slots without references, checkpoints included."""
        return len(self._free) + len(self._checkpoints)

    @property
    def checkpoints(self) -> int:
        """Number of checkpoints."""
        return len(self._checkpoints)

    def allocate(self, count: int) -> list[int]:
        """Allocates slots; those of checkpoints are used last."""
        while len(self._free) < count:
            _, slot = self._checkpoints.popitem(last=False)
            self._free.append(slot)
        return super().allocate(count)

    def save(self) -> int | None:
        """Allocates a slot for a state that a step saves; None if no spare slot is left."""
        if self.saved == self.spare:
            return None
        self.saved += 1
        (slot,) = self.allocate(1)
        return slot

    def drop(self, slot: int) -> None:
        """Frees the slot of a saved state."""
        self.saved -= 1
        self.deallocate([slot])

    def keep(self, slot: int, content: int) -> bool:
        """Makes a saved state the checkpoint of a prefix; False if it has one, and the slot is free again."""
        if content in self._checkpoints:
            self.drop(slot)
            return False
        self.saved -= 1
        assert self._references[slot] == 1
        self._references[slot] = 0
        self._checkpoints[content] = slot
        self._numbers[slot] += 1
        return True

    def find(self, content: int) -> int | None:
        """Returns the slot of a prefix's checkpoint; None if it has none."""
        return self._checkpoints.get(content)

    def number(self, slot: int) -> int:
        """Returns the number of checkpoints that a slot has held so far, the present one included."""
        return self._numbers[slot]

    def use(self, content: int) -> None:
        """Marks a checkpoint as used just now."""
        self._checkpoints.move_to_end(content)

    def forget(self, content: int) -> None:
        """Frees the slot of a prefix's checkpoint, if it has one."""
        slot = self._checkpoints.pop(content, None)
        if slot is not None:
            self._free.append(slot)

    def reset(self) -> None:
        """Frees all slots and forgets all checkpoints."""
        super().reset()
        self.saved = 0
        self._checkpoints.clear()
