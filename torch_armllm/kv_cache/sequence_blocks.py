"""One sequence's place in the paged cache."""

from __future__ import annotations

from torch_armllm.kv_cache.block_pool import BlockPool


class SequenceBlocks:
    """The blocks that hold a sequence's keys and values, and how many positions are filled."""

    __slots__ = ("blocks", "length", "pool")

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.blocks: list[int] = []
        self.length = 0

    def append(self, tokens: int) -> list[int]:
        """Makes room for further positions and returns their slots."""
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
        """Slots of all filled positions."""
        size = self.pool.shape.block_size
        return [self.blocks[p // size] * size + p % size for p in range(self.length)]

    def truncate(self, length: int) -> None:
        """Forgets the positions from ``length`` on."""
        assert 0 <= length <= self.length
        keep = -(-length // self.pool.shape.block_size)
        self.pool.deallocate(self.blocks[keep:])
        del self.blocks[keep:]
        self.length = length

    def fork(self) -> SequenceBlocks:
        """A sequence that shares all blocks with this one until either of them writes."""
        other = SequenceBlocks(self.pool)
        other.blocks = self.pool.share(self.blocks)
        other.length = self.length
        return other

    def release(self) -> None:
        """Lets all blocks go."""
        self.truncate(0)
