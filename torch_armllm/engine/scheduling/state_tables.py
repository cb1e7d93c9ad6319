"""State slots of sequences: their own, states that steps save, and checkpoints of prefixes."""

from __future__ import annotations

from collections.abc import Sequence as GenericSequence

from torch_armllm.engine.request import Sequence
from torch_armllm.engine.scheduling.step import StateMove, Step
from torch_armllm.kv_cache.block_manager import BlockManager
from torch_armllm.kv_cache.state_slots import StateSlots

_SPREAD = 4
"""Most checkpoints in the middle of a prompt."""
_LEAST_STRIDE = 8
"""Blocks between them, at least."""


class StateTables:
    """Allocates and frees the state slots of sequences, and keeps checkpoints for the prefix cache.

    A sequence begins with its own slot or with a copy of a checkpoint.  Steps save further states: at block
    boundaries, which become checkpoints when the step is computed, and after each draft token but the last.
    If a draft token is rejected, the slot of the state before it becomes the sequence's own.

    Moves of states have one order, that of the calls that ask for them.

    Attributes:
        slots: allocator of the slots.
    """

    def __init__(self, blocks: BlockManager, slots: StateSlots) -> None:
        self.slots = slots
        self._blocks = blocks
        self._caches = blocks.prefix_cache is not None
        self._spread = min(_SPREAD, slots.spare // 8)
        self._planned: dict[Sequence, list[int]] = {}
        self._rolling: dict[Sequence, int] = {}
        self._moves: list[StateMove] = []

    @property
    def settled(self) -> bool:
        """True if no moves wait for the next step."""
        return not self._moves

    def begin(self, step: Step) -> None:
        """Lets a step make the moves that were asked for after the step before it."""
        step.state_moves += self._moves
        self._moves = []

    def admit(self, sequence: Sequence, step: Step, checkpoint: int | None) -> None:
        """Allocates the slot of a sequence, and fills it from swap memory or from a checkpoint's slot."""
        swapped = sequence.state
        if checkpoint is not None:
            content = self._content(sequence, sequence.computed)
            assert content is not None
            self.slots.use(content)
        (sequence.state,) = self.slots.allocate(1)
        if swapped is not None:
            step.state_moves.append(StateMove("swap_in", swapped, sequence.state))
            self._blocks.swapped_states.deallocate([swapped])
        elif checkpoint is not None and checkpoint != sequence.state:
            step.state_moves.append(StateMove("copy", checkpoint, sequence.state))

    def fork(self, sequence: Sequence, siblings: GenericSequence[Sequence]) -> None:
        """Gives copies of a sequence's states to others; the next step copies them."""
        assert sequence.state is not None
        for sibling in siblings:
            (sibling.state,) = self.slots.allocate(1)
            self._moves.append(StateMove("copy", sequence.state, sibling.state))

    def plan(self, sequence: Sequence, known: int) -> None:
        """Plans the checkpoints of an admitted sequence's prompt.

        They are at the last boundary of a block, where the prompt leaves what the cache knows, and at a few
        positions between, which are the same for all prompts of similar length.

        Args:
            sequence: computes the tokens after `Sequence.computed`.
            known: length of the cached prefix, which may be longer than that with a checkpoint.
        """
        if not self._caches:
            return
        size = self._blocks.block_size
        last = (len(sequence.token_ids) - 1) // size * size
        lengths = {last, known}
        if self._spread:
            stride = _LEAST_STRIDE * size
            while last > (self._spread + 1) * stride:
                stride *= 2
            lengths.update(range(stride, last, stride))
        self._planned[sequence] = sorted(length for length in lengths if length > sequence.computed)

    def save_prompt(self, sequence: Sequence, step: Step, start: int, end: int) -> None:
        """Lets a step save the planned states of a chunk; the later ones first, if slots are few."""
        planned = self._planned.get(sequence, ())
        for length in reversed(planned):
            if start < length <= end and not self._save(sequence, step, length):
                break

    def save_decoded(self, sequence: Sequence, step: Step, end: int) -> None:
        """Lets a step save the state at the end of a block that decoding completes."""
        if self._caches and end % self._blocks.block_size == 0:
            self._save(sequence, step, end)

    @property
    def room_for_drafts(self) -> int:
        """Number of states before draft tokens that a step may still save; prompts keep half of the slots."""
        spare = self.slots.spare
        return max(0, (spare if not self._caches else -(-spare // 2)) - self.slots.saved)

    def save_draft(self, sequence: Sequence, step: Step, count: int) -> None:
        """Lets a step save the states before each of ``count`` draft tokens, for which slots are spare."""
        for length in range(sequence.computed + 1, sequence.computed + 1 + count):
            saved = self._save(sequence, step, length)
            assert saved

    def _save(self, sequence: Sequence, step: Step, length: int) -> bool:
        slot = self.slots.save()
        if slot is None:
            return False
        sequence.saves[length] = slot
        step.saves_states = True
        return True

    def commit(self, sequence: Sequence, end: int) -> None:
        """Sorts the saved states of a computed step, after its blocks were added to the prefix cache.

        Args:
            sequence: its computed tokens are those that stay.
            end: position after the last one that the step computed.
        """
        saves, sequence.saves = sequence.saves, {}
        slots, computed = self.slots, sequence.computed
        for length, slot in saves.items():
            at_boundary = self._caches and length % self._blocks.block_size == 0
            if length == computed < end:
                before, sequence.state = sequence.state, slot
                assert before is not None
                # the two slots change places
                if at_boundary:  # a checkpoint as well: the next step copies it, and its commit keeps it
                    sequence.saves[length] = before
                    self._moves.append(StateMove("copy", slot, before))
                else:
                    slots.drop(before)
            elif length <= computed and at_boundary:
                self._keep(sequence, length, slot)
            else:
                slots.drop(slot)

    def _keep(self, sequence: Sequence, length: int, slot: int) -> None:
        """Makes a saved state a checkpoint; it replaces the last one that decoding made."""
        content = self._content(sequence, length)
        if content is None:
            self.slots.drop(slot)
            return
        kept = self.slots.keep(slot, content)
        if length > sequence.prompt_length:
            before = self._rolling.pop(sequence, None)
            if before is not None and before != content:
                self.slots.forget(before)
            if kept:
                self._rolling[sequence] = content

    def _content(self, sequence: Sequence, length: int) -> int | None:
        cache = self._blocks.prefix_cache
        assert cache is not None
        return cache.content_of(sequence.blocks, sequence.cache_ids, length, sequence.prefix_root)

    def swap_out(self, sequence: Sequence, step: Step) -> int:
        """Moves the states of a sequence to a slot of swap memory, which has one, and returns it."""
        assert sequence.state is not None
        (swapped,) = self._blocks.swapped_states.allocate(1)
        step.state_moves.append(StateMove("swap_out", sequence.state, swapped))
        return swapped

    def free(self, sequence: Sequence) -> None:
        """Frees all slots of a sequence outside of swap memory; its checkpoints stay."""
        for slot in sequence.saves.values():
            self.slots.drop(slot)
        sequence.saves.clear()
        if sequence.state is not None:
            self.slots.deallocate([sequence.state])
            sequence.state = None

    def forget(self, sequence: Sequence) -> None:
        """Forgets the plans for a sequence, which ends or is computed again from its beginning."""
        self._planned.pop(sequence, None)
        self._rolling.pop(sequence, None)
