"""Blocks of sequences: in the KV cache while they run, in swap memory while swapped out."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as GenericSequence

from torch_armllm.engine.request import Sequence
from torch_armllm.engine.scheduling.state_tables import StateTables
from torch_armllm.engine.scheduling.step import Step
from torch_armllm.kv_cache.block_manager import BlockManager


class BlockTables:
    """Allocates and frees the blocks of sequences, and their state slots with them.

    A block is written only while one sequence holds it, and never after the prefix cache knows it. Full
    blocks are shared. The partial block that forked sequences share is copied on write, for all of them but
    the last.

    Attributes:
        states: state slots of the sequences; None without recurrent layers.
        swapped: swap blocks of the sequences that are swapped out.
        on_leave: called with the tokens of a sequence, and the number of computed ones, before its blocks are
            given back; None: nobody asks.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self.blocks = blocks
        self.swapped: dict[Sequence, list[int]] = {}
        self.states = None if blocks.states is None else StateTables(blocks, blocks.states)
        self.on_leave: Callable[[GenericSequence[int], int], None] | None = None
        self._arriving: dict[Sequence, int] = {}

    def admit(self, sequence: Sequence, step: Step, reserve: int, max_uncomputed: int) -> bool:
        """Allocates blocks for all tokens of a sequence; cached and swapped blocks count as computed.

        Args:
            sequence: holds no blocks.
            step: copies the blocks that are swapped in.
            reserve: blocks that must stay free.
            max_uncomputed: most tokens that may remain to be computed.

        Returns:
            True if the sequence fits. Otherwise nothing is changed.
        """
        blocks = self.blocks
        slots = self.swapped.get(sequence)
        cached_blocks, checkpoint, known = self._find(sequence)
        if not self._has_room(sequence, cached_blocks, reserve, max_uncomputed):
            return False
        cached = len(cached_blocks) * blocks.block_size
        sequence.blocks = blocks.share(cached_blocks) + blocks.allocate(
            self._size(sequence) - len(cached_blocks)
        )
        if slots is None:
            sequence.computed = cached
            self._count(sequence)
        if self.states is not None:
            self.states.admit(sequence, step, checkpoint)
            if slots is None:
                self.states.plan(sequence, known)
        if slots is not None:
            held = sequence.blocks[: len(slots)]
            step.swaps_in += list(zip(slots, held, strict=True))[len(cached_blocks) :]
            blocks.swap.deallocate(self.swapped.pop(sequence))
            self._arriving[sequence] = cached  # first position to cache again after the copies
        return True

    def _find(self, sequence: Sequence) -> tuple[list[int], int | None, int]:
        """Finds what need not be computed.

        Returns:
            Blocks, the slot of the checkpoint at their end if there is one, and the length of the longest
            cached prefix, which may lack a checkpoint.
        """
        cacheable = self._cacheable(sequence)
        if self.states is None or sequence in self.swapped:
            found = self.blocks.find(sequence.cache_ids, cacheable, sequence.prefix_root)
            return found, None, len(found) * self.blocks.block_size
        found, checkpoint, known = self.blocks.find_checkpoint(
            sequence.cache_ids, cacheable, sequence.prefix_root
        )
        return found, checkpoint, len(known) * self.blocks.block_size

    def fits(self, sequence: Sequence, reserve: int, max_uncomputed: int) -> bool:
        """True if `admit` would succeed."""
        return self._has_room(sequence, self._find(sequence)[0], reserve, max_uncomputed)

    def fits_with(self, sequence: Sequence, others: GenericSequence[Sequence], reserve: int) -> bool:
        """True if a sequence fits while only these other sequences keep their blocks."""
        held = {block for other in others for block in other.blocks}
        cached_blocks, _, _ = self._find(sequence)
        missing = self._size(sequence) - sum(block in held for block in cached_blocks)
        return missing + reserve + len(held) <= self.blocks.num_blocks

    def _has_room(
        self, sequence: Sequence, cached_blocks: GenericSequence[int], reserve: int, max_uncomputed: int
    ) -> bool:
        swapped = sequence in self.swapped
        computed = sequence.computed if swapped else len(cached_blocks) * self.blocks.block_size
        missing = self._size(sequence) - len(cached_blocks) + self.blocks.count_free(cached_blocks)
        uncomputed = len(sequence.token_ids) - computed
        return uncomputed <= max_uncomputed and missing + reserve <= self.blocks.free

    def _size(self, sequence: Sequence) -> int:
        """Number of blocks for all its tokens."""
        return -(-len(sequence.token_ids) // self.blocks.block_size)

    def _cacheable(self, sequence: Sequence) -> int:
        """Number of tokens that may come from the prefix cache."""
        if sequence in self.swapped:
            return sequence.computed
        if sequence.params.prompt_logprobs is not None:
            return 0  # the logits of all positions are needed
        return len(sequence.token_ids) - 1  # the logits of the last position are needed

    def _count(self, sequence: Sequence) -> None:
        cache, request = self.blocks.prefix_cache, sequence.request
        if cache is not None:
            cache.tokens_queried += self._cacheable(sequence)
            cache.tokens_hit += sequence.computed
        if request.metrics.preemptions == 0:
            request.num_cached_tokens = sequence.computed

    def extend(self, sequence: Sequence, step: Step) -> bool:
        """Makes the block of the next position writable: allocates or copies it. False if none is free."""
        blocks, table, index = self.blocks, sequence.blocks, sequence.computed // self.blocks.block_size
        if index < len(table) and not blocks.is_shared(table[index]):
            return True
        if blocks.free == 0:
            return False
        (block,) = blocks.allocate(1)
        if index == len(table):
            table.append(block)
        else:
            step.copies.append((table[index], block))
            blocks.deallocate([table[index]])
            table[index] = block
        return True

    def fit_draft(self, sequence: Sequence, step: Step, max_tokens: int, reserve: int) -> int:
        """Shortens a draft to ``max_tokens``, and to the blocks and state slots that it may use.

        Args:
            sequence: has the draft.
            step: verifies it.
            max_tokens: most tokens of the draft.
            reserve: blocks that must stay free.

        Returns:
            The number of tokens that remain.
        """
        blocks, table, length = self.blocks, sequence.blocks, len(sequence.token_ids)
        states = self.states
        if states is not None:
            max_tokens = min(max_tokens, states.room_for_drafts)
        count = max(0, min(len(sequence.draft), max_tokens))
        while len(table) * blocks.block_size < length + count and blocks.free > reserve:
            table += blocks.allocate(1)
        count = min(count, len(table) * blocks.block_size - length)
        del sequence.draft[count:]
        if states is not None:
            states.save_draft(sequence, step, count)
        return count

    def advance(self, sequence: Sequence, start: int, end: int, tokens: GenericSequence[int]) -> None:
        """Records computed positions ``start`` to ``end`` and appends ``tokens``.

        A draft is dropped, with the blocks that only it needed; its accepted tokens are among ``tokens``.
        """
        size = self.blocks.block_size
        if self._arriving:
            start = self._arriving.pop(sequence, start)
        token_ids = sequence.token_ids
        token_ids += tokens
        computed = len(token_ids) - 1
        if end < computed:
            computed = end
        sequence.computed = computed
        if computed // size != start // size:
            tokens_of = sequence.blocks, sequence.cache_ids
            self.blocks.cache_full_blocks(*tokens_of, start, computed, sequence.prefix_root)
        if sequence.saves:
            assert self.states is not None
            self.states.commit(sequence, end)
        if sequence.draft:
            sequence.draft.clear()
            num_blocks = -(-len(sequence.token_ids) // size)
            self.blocks.deallocate(sequence.blocks[num_blocks:])
            del sequence.blocks[num_blocks:]

    def swap_out(self, sequence: Sequence, step: Step) -> bool:
        """Swaps the computed blocks of a sequence out; False if swap memory has no room."""
        used = -(-sequence.computed // self.blocks.block_size)
        if used > self.blocks.swap.free or (self.states and not self.blocks.swapped_states.free):
            return False
        slots = self.swapped[sequence] = self.blocks.swap.allocate(used)
        step.swaps_out += zip(sequence.blocks, slots, strict=False)
        swapped = None if self.states is None else self.states.swap_out(sequence, step)
        self._deallocate(sequence)
        sequence.state = swapped
        return True

    def free(self, sequence: Sequence) -> None:
        """Frees all blocks, swap blocks and state slots of a sequence."""
        if sequence in self.swapped:
            self.blocks.swap.deallocate(self.swapped.pop(sequence))
            if sequence.state is not None:
                self.blocks.swapped_states.deallocate([sequence.state])
                sequence.state = None
        self._deallocate(sequence)
        if self.states is not None:
            self.states.forget(sequence)
        sequence.computed = 0

    def _deallocate(self, sequence: Sequence) -> None:
        self._arriving.pop(sequence, None)
        if self.on_leave is not None and sequence.blocks and sequence.request.pictures is None:
            self.on_leave(sequence.token_ids, sequence.computed)
        self.blocks.deallocate(sequence.blocks)
        if self.states is not None:
            self.states.free(sequence)
        sequence.blocks.clear()
        sequence.draft.clear()
