"""Numbers of an engine's blocks and state slots: KV cache, prefix cache, swap space.

The runner owns the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_armllm.kv_cache.block_allocator import BlockAllocator
from torch_armllm.kv_cache.prefix_cache import NOTHING, PrefixCache
from torch_armllm.kv_cache.state_slots import StateSlots


class BlockManager(BlockAllocator):
    """An allocator of a fixed number of blocks, with a prefix cache and an allocator of swap blocks.

    A cached block that loses its last reference stays findable until it is allocated again.

    Attributes:
        num_blocks: number of blocks.
        block_size: positions per block.
        swap_blocks: number of swap blocks.
        swap: allocator of the swap blocks.
        states: allocator of the state slots; None without recurrent layers.
        swapped_states: allocator of the state slots in swap memory.
        prefix_cache: finds blocks by their tokens; None if prefix caching is off.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        swap_blocks: int = 0,
        enable_prefix_caching: bool = True,
        state_slots: int = 0,
        swap_state_slots: int = 0,
        spare_state_slots: int = 0,
    ) -> None:
        if num_blocks < 1 or block_size < 1 or swap_blocks < 0:
            raise ValueError(
                f"{num_blocks} blocks of {block_size} positions and {swap_blocks} swap blocks make no cache: "
                "give it more memory"
            )
        super().__init__(num_blocks)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.swap_blocks = swap_blocks
        self.swap = BlockAllocator(swap_blocks)
        self.states = StateSlots(state_slots, spare_state_slots) if state_slots else None
        self.swapped_states = BlockAllocator(swap_state_slots)
        self.prefix_cache = PrefixCache(num_blocks, block_size) if enable_prefix_caching else None

    @property
    def free(self) -> int:
        """Number of blocks without references, including those that the prefix cache can find."""
        return len(self._free) + (self.prefix_cache.idle if self.prefix_cache is not None else 0)

    @property
    def usage(self) -> float:
        """Fraction of the blocks that have references, 0 … 1."""
        return 1 - self.free / self.num_blocks

    @property
    def hit_rate(self) -> float:
        """Fraction of the tokens looked up that the prefix cache held, 0 … 1."""
        return self.prefix_cache.hit_rate if self.prefix_cache is not None else 0.0

    def allocate(self, count: int) -> list[int]:
        """Allocates blocks without references; those that the prefix cache can find are used last."""
        assert count <= self.free
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                assert self.prefix_cache is not None
                block, content = self.prefix_cache.evict()
                if self.states is not None:
                    self.states.forget(content)
            assert self._references[block] == 0
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Sequence[int]) -> list[int]:
        """Adds a reference to each block, allocated or returned by `find`, and returns them as a new list."""
        for block in blocks:
            if self._references[block] == 0:
                assert self.prefix_cache is not None
                self.prefix_cache.revive(block)
            self._references[block] += 1
        return list(blocks)

    def deallocate(self, blocks: Sequence[int]) -> None:
        """Drops a reference to each block of a sequence; the last block is the first to be evicted."""
        super().deallocate(blocks[::-1])

    def _release(self, block: int) -> None:
        if self.prefix_cache is None or not self.prefix_cache.retire(block):
            self._free.append(block)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached blocks; False, and nothing is changed, if sequences hold blocks."""
        if self.free < self.num_blocks:
            return False
        if self.prefix_cache is None:
            return True
        while self.prefix_cache.idle:
            block, content = self.prefix_cache.evict()
            if self.states is not None:
                self.states.forget(content)
            self._free.append(block)
        return True

    def count_free(self, blocks: Sequence[int]) -> int:
        """Returns the number of these blocks that have no references."""
        return sum(self._references[block] == 0 for block in blocks)

    def find(self, token_ids: Sequence[int], length: int, root: int = NOTHING) -> list[int]:
        """Returns the blocks that hold the longest cached prefix of ``token_ids[:length]``; see `share`.

        ``root`` is that of `PrefixCache.find`.
        """
        return self.prefix_cache.find(token_ids, length, root) if self.prefix_cache is not None else []

    def find_checkpoint(
        self, token_ids: Sequence[int], length: int, root: int = NOTHING
    ) -> tuple[list[int], int | None, list[int]]:
        """Finds the longest cached prefix of ``token_ids[:length]`` whose states are known.

        Returns:
            Its blocks, the slot of its states, and the blocks of the longest prefix with or without states.
        """
        assert self.states is not None
        known = self.find(token_ids, length, root)
        for count in range(len(known), 0, -1):
            assert self.prefix_cache is not None
            slot = self.states.find(self.prefix_cache.content(known[count - 1]))
            if slot is not None:
                return known[:count], slot, known
        return [], None, known

    def cache_full_blocks(
        self,
        blocks: Sequence[int],
        token_ids: Sequence[int],
        start: int,
        end: int,
        root: int = NOTHING,
    ) -> None:
        """Adds the blocks that a step filled to the prefix cache.

        Args:
            blocks: blocks of a sequence.
            token_ids: tokens of the sequence.
            start: first position that the step computed.
            end: position after the last one that it computed.
            root: see `PrefixCache.find`.
        """
        if self.prefix_cache is None:
            return
        size = self.block_size
        for i in range(start // size, end // size):
            previous = blocks[i - 1] if i else None
            self.prefix_cache.insert(blocks[i], previous, token_ids[i * size : (i + 1) * size], root)
