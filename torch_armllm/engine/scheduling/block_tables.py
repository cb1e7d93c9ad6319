"""What answers hold of the KV cache: blocks while they run, swap blocks while they wait."""

from __future__ import annotations

from collections.abc import Sequence

from torch_armllm.engine.request import Answer
from torch_armllm.engine.step import Step
from torch_armllm.kv_cache.block_manager import BlockManager


class BlockTables:
    """Gives answers the blocks that their next positions need, and takes them back.

    A block is written by its only holder, and no more once it can be found: full blocks are shared as they
    are, the one that answers to the same prompt have begun in common is copied for all of them but the last.

    Attributes:
        swapped: the swap blocks of answers that have some.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self.blocks = blocks
        self.swapped: dict[Answer, list[int]] = {}
        self._arriving: dict[Answer, int] = {}

    def admit(self, answer: Answer, step: Step, reserve: int, most: int) -> bool:
        """Gives an answer blocks for all its tokens, filled as far as they were computed once.

        Args:
            answer: holds no blocks.
            step: in which blocks are swapped in.
            reserve: blocks that are left to others.
            most: tokens that may remain to be computed.

        Returns:
            Whether it fits; nothing has happened where it does not.
        """
        blocks = self.blocks
        slots = self.swapped.get(answer)
        sought = self._sought(answer)
        found = blocks.find(answer.token_ids, sought)
        if not self._has_room(answer, found, reserve, most):
            return False
        begun = len(found) * blocks.block_size
        answer.blocks = blocks.share(found) + blocks.allocate(self._size(answer) - len(found))
        if slots is None:
            answer.computed = begun
            self._count(answer, sought)
        else:
            held = answer.blocks[: len(slots)]
            step.swaps_in += list(zip(slots, held, strict=True))[len(found) :]
            blocks.deallocate_slots(self.swapped.pop(answer))
            self._arriving[answer] = begun  # cannot be found before the step has filled them
        return True

    def fits(self, answer: Answer, reserve: int, most: int) -> bool:
        """Whether `admit` would do what it is asked for."""
        return self._has_room(answer, self.blocks.find(answer.token_ids, self._sought(answer)), reserve, most)

    def fits_beside(self, answer: Answer, others: Sequence[Answer], reserve: int) -> bool:
        """Whether an answer fits if these others alone keep what they hold."""
        held = {block for other in others for block in other.blocks}
        found = self.blocks.find(answer.token_ids, self._sought(answer))
        missing = self._size(answer) - sum(block in held for block in found)
        return missing + reserve + len(held) <= self.blocks.num_blocks

    def _has_room(self, answer: Answer, found: Sequence[int], reserve: int, most: int) -> bool:
        computed = answer.computed if answer in self.swapped else len(found) * self.blocks.block_size
        missing = self._size(answer) - len(found) + self.blocks.count_free(found)
        return len(answer.token_ids) - computed <= most and missing + reserve <= self.blocks.free

    def _size(self, answer: Answer) -> int:
        """Blocks that all its tokens fill."""
        return -(-len(answer.token_ids) // self.blocks.block_size)

    def _sought(self, answer: Answer) -> int:
        """How many of an answer's tokens may come from the prefix cache."""
        if answer in self.swapped:
            return answer.computed
        if answer.params.prompt_logprobs is not None:
            return 0  # the logits of all positions are wanted
        return len(answer.token_ids) - 1  # those of the last one are

    def _count(self, answer: Answer, sought: int) -> None:
        cache, request = self.blocks.cache, answer.request
        if cache is not None:
            cache.tokens_asked += sought
            cache.tokens_found += answer.computed
        if request.metrics.preemptions == 0:
            request.num_cached_tokens = answer.computed

    def extend(self, answer: Answer, step: Step) -> bool:
        """Gives an answer a block of its own for its next position; False where none is free."""
        blocks, table, index = self.blocks, answer.blocks, answer.computed // self.blocks.block_size
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

    def fit_draft(self, answer: Answer, most: int, reserve: int) -> int:
        """Cuts a draft off behind ``most`` tokens and where only ``reserve`` blocks are left to others.

        Returns:
            How many of its tokens remain.
        """
        blocks, table, known = self.blocks, answer.blocks, len(answer.token_ids)
        count = max(0, min(len(answer.draft), most))
        while len(table) * blocks.block_size < known + count and blocks.free > reserve:
            table += blocks.allocate(1)
        count = min(count, len(table) * blocks.block_size - known)
        del answer.draft[count:]
        return count

    def advance(self, answer: Answer, start: int, end: int, tokens: Sequence[int]) -> None:
        """Positions ``start`` to ``end`` were computed, and ``tokens`` are known to follow.

        A draft is rolled back: what remains of it is among the tokens.
        """
        size = self.blocks.block_size
        if self._arriving:
            start = self._arriving.pop(answer, start)
        known = answer.token_ids
        known += tokens
        computed = len(known) - 1
        if end < computed:
            computed = end
        answer.computed = computed
        if computed // size != start // size:
            self.blocks.fill(answer.blocks, answer.token_ids, start, computed)
        if answer.draft:
            answer.draft.clear()
            kept = -(-len(answer.token_ids) // size)
            self.blocks.deallocate(answer.blocks[kept:])
            del answer.blocks[kept:]

    def swap_out(self, answer: Answer, step: Step) -> bool:
        """Moves what an answer has computed to swap memory; False where that has no room."""
        used = -(-answer.computed // self.blocks.block_size)
        if used > self.blocks.free_slots:
            return False
        slots = self.swapped[answer] = self.blocks.allocate_slots(used)
        step.swaps_out += zip(answer.blocks, slots, strict=False)
        self._deallocate(answer)
        return True

    def forget(self, answer: Answer) -> None:
        """Takes everything from an answer."""
        if answer in self.swapped:
            self.blocks.deallocate_slots(self.swapped.pop(answer))
        self._deallocate(answer)
        answer.computed = 0

    def _deallocate(self, answer: Answer) -> None:
        self._arriving.pop(answer, None)
        self.blocks.deallocate(answer.blocks)
        answer.blocks.clear()
        answer.draft.clear()
