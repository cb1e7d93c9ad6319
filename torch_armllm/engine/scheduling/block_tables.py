"""What sequences hold of the KV cache: blocks while they run, swap blocks while they wait."""

from __future__ import annotations

from collections.abc import Sequence as GenericSequence

from torch_armllm.engine.request import Sequence
from torch_armllm.engine.step import Step
from torch_armllm.kv_cache.block_manager import BlockManager


class BlockTables:
    """Gives sequences the blocks that their next positions need, and takes them back.

    A block is written by its only holder, and no more once it can be found: full blocks are shared as they
    are, the one that sequences to the same prompt have begun in common is copied for all of them but the
    last.

    Attributes:
        swapped: the swap blocks of sequences that have some.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self.blocks = blocks
        self.swapped: dict[Sequence, list[int]] = {}
        self._arriving: dict[Sequence, int] = {}

    def admit(self, sequence: Sequence, step: Step, reserve: int, most: int) -> bool:
        """Gives a sequence blocks for all its tokens, filled as far as they were computed once.

        Args:
            sequence: holds no blocks.
            step: in which blocks are swapped in.
            reserve: blocks that are left to others.
            most: tokens that may remain to be computed.

        Returns:
            Whether it fits; nothing has happened where it does not.
        """
        blocks = self.blocks
        slots = self.swapped.get(sequence)
        sought = self._sought(sequence)
        found = blocks.find(sequence.token_ids, sought)
        if not self._has_room(sequence, found, reserve, most):
            return False
        begun = len(found) * blocks.block_size
        sequence.blocks = blocks.share(found) + blocks.allocate(self._size(sequence) - len(found))
        if slots is None:
            sequence.computed = begun
            self._count(sequence, sought)
        else:
            held = sequence.blocks[: len(slots)]
            step.swaps_in += list(zip(slots, held, strict=True))[len(found) :]
            blocks.swap.deallocate(self.swapped.pop(sequence))
            self._arriving[sequence] = begun  # cannot be found before the step has filled them
        return True

    def fits(self, sequence: Sequence, reserve: int, most: int) -> bool:
        """Whether `admit` would do what it is asked for."""
        return self._has_room(
            sequence, self.blocks.find(sequence.token_ids, self._sought(sequence)), reserve, most
        )

    def fits_beside(self, sequence: Sequence, others: GenericSequence[Sequence], reserve: int) -> bool:
        """Whether a sequence fits if these others alone keep what they hold."""
        held = {block for other in others for block in other.blocks}
        found = self.blocks.find(sequence.token_ids, self._sought(sequence))
        missing = self._size(sequence) - sum(block in held for block in found)
        return missing + reserve + len(held) <= self.blocks.num_blocks

    def _has_room(self, sequence: Sequence, found: GenericSequence[int], reserve: int, most: int) -> bool:
        computed = sequence.computed if sequence in self.swapped else len(found) * self.blocks.block_size
        missing = self._size(sequence) - len(found) + self.blocks.count_free(found)
        return len(sequence.token_ids) - computed <= most and missing + reserve <= self.blocks.free

    def _size(self, sequence: Sequence) -> int:
        """Blocks that all its tokens fill."""
        return -(-len(sequence.token_ids) // self.blocks.block_size)

    def _sought(self, sequence: Sequence) -> int:
        """How many of a sequence's tokens may come from the prefix cache."""
        if sequence in self.swapped:
            return sequence.computed
        if sequence.params.prompt_logprobs is not None:
            return 0  # the logits of all positions are wanted
        return len(sequence.token_ids) - 1  # those of the last one are

    def _count(self, sequence: Sequence, sought: int) -> None:
        cache, request = self.blocks.prefix_cache, sequence.request
        if cache is not None:
            cache.tokens_asked += sought
            cache.tokens_found += sequence.computed
        if request.metrics.preemptions == 0:
            request.num_cached_tokens = sequence.computed

    def extend(self, sequence: Sequence, step: Step) -> bool:
        """Gives a sequence a block of its own for its next position; False where none is free."""
        blocks, table, index = self.blocks, sequence.blocks, sequence.computed // self.blocks.block_size
        if index < len(table) and not blocks.is_shared(table[index]):
            return True
        if blocks.free == 0:
            return False
        (own,) = blocks.allocate(1)
        if index == len(table):
            table.append(own)
        else:
            step.copies.append((table[index], own))
            blocks.deallocate([table[index]])
            table[index] = own
        return True

    def fit_draft(self, sequence: Sequence, most: int, reserve: int) -> int:
        """Cuts a draft off behind ``most`` tokens and where only ``reserve`` blocks are left to others.

        Returns:
            How many of its tokens remain.
        """
        blocks, table, known = self.blocks, sequence.blocks, len(sequence.token_ids)
        count = max(0, min(len(sequence.draft), most))
        while len(table) * blocks.block_size < known + count and blocks.free > reserve:
            table += blocks.allocate(1)
        count = min(count, len(table) * blocks.block_size - known)
        del sequence.draft[count:]
        return count

    def advance(self, sequence: Sequence, start: int, end: int, tokens: GenericSequence[int]) -> None:
        """Positions ``start`` to ``end`` were computed, and ``tokens`` are known to follow.

        A draft is rolled back: what remains of it is among the tokens.
        """
        size = self.blocks.block_size
        if self._arriving:
            start = self._arriving.pop(sequence, start)
        known = sequence.token_ids
        known += tokens
        computed = len(known) - 1
        if end < computed:
            computed = end
        sequence.computed = computed
        if computed // size != start // size:
            self.blocks.cache_full_blocks(sequence.blocks, sequence.token_ids, start, computed)
        if sequence.draft:
            sequence.draft.clear()
            kept = -(-len(sequence.token_ids) // size)
            self.blocks.deallocate(sequence.blocks[kept:])
            del sequence.blocks[kept:]

    def swap_out(self, sequence: Sequence, step: Step) -> bool:
        """Moves what a sequence has computed to swap memory; False where that has no room."""
        used = -(-sequence.computed // self.blocks.block_size)
        if used > self.blocks.swap.free:
            return False
        slots = self.swapped[sequence] = self.blocks.swap.allocate(used)
        step.swaps_out += zip(sequence.blocks, slots, strict=False)
        self._deallocate(sequence)
        return True

    def forget(self, sequence: Sequence) -> None:
        """Takes everything from a sequence."""
        if sequence in self.swapped:
            self.blocks.swap.deallocate(self.swapped.pop(sequence))
        self._deallocate(sequence)
        sequence.computed = 0

    def _deallocate(self, sequence: Sequence) -> None:
        self._arriving.pop(sequence, None)
        self.blocks.deallocate(sequence.blocks)
        sequence.blocks.clear()
        sequence.draft.clear()
