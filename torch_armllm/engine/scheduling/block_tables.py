"""Blocks and state slots of sequences: in the KV cache while they run, in swap memory while swapped out."""

from __future__ import annotations

from collections.abc import Sequence as GenericSequence

from torch_armllm.engine.request import Sequence
from torch_armllm.engine.step import Step
from torch_armllm.kv_cache.block_manager import BlockManager


class BlockTables:
    """Allocates and frees the blocks and state slots of sequences.

    A block is written only while one sequence holds it, and never after the prefix cache knows it. Full
    blocks are shared. The partial block that forked sequences share is copied on write, for all of them but
    the last.  The states of recurrent layers change in each step, so forked sequences get copies at once.

    Attributes:
        swapped: swap blocks of the sequences that are swapped out.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self.blocks = blocks
        self.swapped: dict[Sequence, list[int]] = {}
        self._arriving: dict[Sequence, int] = {}
        self._state_copies: list[tuple[int, int]] = []

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
        cacheable = self._cacheable(sequence)
        cached_blocks = blocks.find(sequence.token_ids, cacheable)
        if not self._has_room(sequence, cached_blocks, reserve, max_uncomputed):
            return False
        cached = len(cached_blocks) * blocks.block_size
        sequence.blocks = blocks.share(cached_blocks) + blocks.allocate(
            self._size(sequence) - len(cached_blocks)
        )
        self._admit_state(sequence, step)
        if slots is None:
            sequence.computed = cached
            self._count(sequence, cacheable)
        else:
            held = sequence.blocks[: len(slots)]
            step.swaps_in += list(zip(slots, held, strict=True))[len(cached_blocks) :]
            blocks.swap.deallocate(self.swapped.pop(sequence))
            self._arriving[sequence] = cached  # first position to cache again after the copies
        return True

    def _admit_state(self, sequence: Sequence, step: Step) -> None:
        """Allocates a state slot, which is there for each sequence of `max_num_seqs`."""
        if self.blocks.states is None:
            return
        swapped = sequence.state
        (sequence.state,) = self.blocks.states.allocate(1)
        if swapped is not None:
            step.state_swaps_in.append((swapped, sequence.state))
            self.blocks.swapped_states.deallocate([swapped])

    def fork_states(self, sequence: Sequence, siblings: GenericSequence[Sequence]) -> None:
        """Gives copies of a sequence's states to others; the next step copies them."""
        if self.blocks.states is None:
            return
        assert sequence.state is not None
        for sibling in siblings:
            (sibling.state,) = self.blocks.states.allocate(1)
            self._state_copies.append((sequence.state, sibling.state))

    def copy_states(self, step: Step) -> None:
        """Lets a step copy the states of sequences that were forked before it."""
        step.state_copies, self._state_copies = self._state_copies, []

    def fits(self, sequence: Sequence, reserve: int, max_uncomputed: int) -> bool:
        """True if `admit` would succeed."""
        return self._has_room(
            sequence, self.blocks.find(sequence.token_ids, self._cacheable(sequence)), reserve, max_uncomputed
        )

    def fits_with(self, sequence: Sequence, others: GenericSequence[Sequence], reserve: int) -> bool:
        """True if a sequence fits while only these other sequences keep their blocks."""
        held = {block for other in others for block in other.blocks}
        cached_blocks = self.blocks.find(sequence.token_ids, self._cacheable(sequence))
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

    def _count(self, sequence: Sequence, cacheable: int) -> None:
        cache, request = self.blocks.prefix_cache, sequence.request
        if cache is not None:
            cache.tokens_queried += cacheable
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

    def fit_draft(self, sequence: Sequence, max_tokens: int, reserve: int) -> int:
        """Shortens a draft to ``max_tokens``, and to the blocks that it may use.

        Args:
            sequence: has the draft.
            max_tokens: most tokens of the draft.
            reserve: blocks that must stay free.

        Returns:
            The number of tokens that remain.
        """
        blocks, table, length = self.blocks, sequence.blocks, len(sequence.token_ids)
        count = max(0, min(len(sequence.draft), max_tokens))
        while len(table) * blocks.block_size < length + count and blocks.free > reserve:
            table += blocks.allocate(1)
        count = min(count, len(table) * blocks.block_size - length)
        del sequence.draft[count:]
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
            self.blocks.cache_full_blocks(sequence.blocks, sequence.token_ids, start, computed)
        if sequence.draft:
            sequence.draft.clear()
            num_blocks = -(-len(sequence.token_ids) // size)
            self.blocks.deallocate(sequence.blocks[num_blocks:])
            del sequence.blocks[num_blocks:]

    def swap_out(self, sequence: Sequence, step: Step) -> bool:
        """Swaps the computed blocks of a sequence out; False if swap memory has no room."""
        used = -(-sequence.computed // self.blocks.block_size)
        if used > self.blocks.swap.free or (self.blocks.states and not self.blocks.swapped_states.free):
            return False
        slots = self.swapped[sequence] = self.blocks.swap.allocate(used)
        step.swaps_out += zip(sequence.blocks, slots, strict=False)
        swapped = None
        if sequence.state is not None:
            (swapped,) = self.blocks.swapped_states.allocate(1)
            step.state_swaps_out.append((sequence.state, swapped))
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
        sequence.computed = 0

    def _deallocate(self, sequence: Sequence) -> None:
        self._arriving.pop(sequence, None)
        self.blocks.deallocate(sequence.blocks)
        if sequence.state is not None:
            assert self.blocks.states is not None
            self.blocks.states.deallocate([sequence.state])
            sequence.state = None
        sequence.blocks.clear()
        sequence.draft.clear()
