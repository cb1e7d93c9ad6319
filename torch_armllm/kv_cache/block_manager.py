"""Who holds which blocks of the KV cache, in numbers alone: the memory is the runner's."""

from __future__ import annotations

from collections.abc import Sequence

from torch_armllm.kv_cache.prefix_cache import PrefixCache


class BlockManager:
    """Reference-counted blocks of a fixed number, the prefix cache over them, and slots of swap memory.

    Taking or letting go of a block takes the same time whatever their number.

    Attributes:
        cache: finds blocks by their text; None where prefix caching is off.
    """

    def __init__(
        self, num_blocks: int, block_size: int, swap_blocks: int = 0, enable_prefix_caching: bool = True
    ) -> None:
        if num_blocks < 1 or block_size < 1 or swap_blocks < 0:
            raise ValueError(
                f"{num_blocks} blocks of {block_size} positions and {swap_blocks} swap blocks make no cache: "
                "give it more memory"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.swap_blocks = swap_blocks
        self.cache = PrefixCache(num_blocks, block_size) if enable_prefix_caching else None
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._free_slots = list(range(swap_blocks - 1, -1, -1))

    @property
    def free(self) -> int:
        """Blocks that nobody holds, those included that the prefix cache can find."""
        return len(self._free) + (self.cache.idle if self.cache is not None else 0)

    @property
    def free_slots(self) -> int:
        """Swap blocks that nobody holds."""
        return len(self._free_slots)

    @property
    def usage(self) -> float:
        """The part of the blocks that is held, 0 … 1."""
        return 1 - self.free / self.num_blocks

    @property
    def hit_rate(self) -> float:
        """Tokens that the prefix cache held, of all those that were looked for there, 0 … 1."""
        return self.cache.hit_rate if self.cache is not None else 0.0

    def allocate(self, count: int) -> list[int]:
        """Takes blocks that nobody holds, those that hold no text first."""
        assert count <= self.free
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                assert self.cache is not None
                block = self.cache.evict()
            assert self._references[block] == 0
            self._references[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Sequence[int]) -> list[int]:
        """Holds blocks once more, found or held ones, and returns them as a list of their own."""
        for block in blocks:
            if self._references[block] == 0:
                assert self.cache is not None
                self.cache.revive(block)
            self._references[block] += 1
        return list(blocks)

    def deallocate(self, blocks: Sequence[int]) -> None:
        """Lets blocks of a text go, the last first, so that its beginning is found for longest."""
        for block in reversed(blocks):
            assert self._references[block] > 0
            self._references[block] -= 1
            if self._references[block] == 0 and not (self.cache is not None and self.cache.retire(block)):
                self._free.append(block)

    def is_shared(self, block: int) -> bool:
        """Whether a block has to be copied before one of its holders writes to it."""
        return self._references[block] > 1

    def count_free(self, blocks: Sequence[int]) -> int:
        """How many of some found blocks nobody holds."""
        return sum(self._references[block] == 0 for block in blocks)

    def find(self, token_ids: Sequence[int], length: int) -> list[int]:
        """Blocks that hold the longest known beginning of ``token_ids[:length]``; not held yet."""
        return self.cache.find(token_ids, length) if self.cache is not None else []

    def fill(self, blocks: Sequence[int], token_ids: Sequence[int], start: int, end: int) -> None:
        """Positions ``start`` to ``end`` of a text were computed: the blocks that are full can be found."""
        if self.cache is None:
            return
        size = self.block_size
        for i in range(start // size, end // size):
            before = blocks[i - 1] if i else None
            self.cache.insert(blocks[i], before, token_ids[i * size : (i + 1) * size])

    def allocate_slots(self, count: int) -> list[int]:
        """Takes swap blocks."""
        assert count <= len(self._free_slots)
        return [self._free_slots.pop() for _ in range(count)]

    def deallocate_slots(self, slots: Sequence[int]) -> None:
        """Lets swap blocks go."""
        self._free_slots.extend(slots)
        assert len(self._free_slots) <= self.swap_blocks
