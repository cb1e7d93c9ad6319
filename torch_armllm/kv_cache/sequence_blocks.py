"""Block table of one sequence in a block pool."""

from __future__ import annotations

from torch_armllm.kv_cache.block_pool import BlockPool


class SequenceBlocks:
    """The blocks that hold a sequence's keys and values, and the number of filled positions."""

    __slots__ = ("blocks", "length", "pool")

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.blocks: list[int] = []
        self.length = 0

    def append(self, tokens: int) -> list[int]:
        """Allocates slots for further positions and returns them.

        A partially filled last block is copied first if other sequences share it (copy-on-write).
        """
        size = self.pool.shape.block_size
        end = self.length + tokens
        partial = self.length % size
        if tokens and partial and self.pool.is_shared(self.blocks[-1]):
            self.blocks[-1] = self.pool.copy(self.blocks[-1])
        missing = -(-end // size) - len(self.blocks)
        if missing > 0:
            self.blocks += self.pool.allocate(missing)
        blocks = self.blocks
        slots = [blocks[p // size] * size + p % size for p in range(self.length, end)]
        self.length = end
        return slots

    def slots(self) -> list[int]:
        """Returns the slots of all filled positions."""
        size = self.pool.shape.block_size
        return [self.blocks[p // size] * size + p % size for p in range(self.length)]

    def truncate(self, length: int) -> None:
        """Drops the positions from ``length`` on, and frees the blocks that no longer hold any."""
        assert 0 <= length <= self.length
        keep = -(-length // self.pool.shape.block_size)
        self.pool.deallocate(self.blocks[keep:])
        del self.blocks[keep:]
        self.length = length

    def fork(self) -> SequenceBlocks:
        """Returns a copy that shares all blocks with this sequence until either of them writes."""
        other = SequenceBlocks(self.pool)
        other.blocks = self.pool.share(self.blocks)
        other.length = self.length
        return other

    def release(self) -> None:
        """Drops all positions and blocks."""
        self.truncate(0)
