"""Blocks and state slot of one sequence in a block pool."""

from __future__ import annotations

from torch_armllm.kv_cache.block_pool import BlockPool


class SequenceBlocks:
    """The blocks that hold a sequence's keys and values, and the number of filled positions.

    Attributes:
        state: slot of the recurrent layers' states; None before the first position, and for models without.
    """

    __slots__ = ("blocks", "length", "pool", "state")

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.blocks: list[int] = []
        self.length = 0
        self.state: int | None = None

    def append(self, tokens: int) -> list[int]:
        """Allocates slots for further positions and returns them; the first positions also get a state slot.

        A partially filled last block is copied first if other sequences share it (copy-on-write).
        """
        size = self.pool.shape.block_size
        if self.state is None and self.pool.shape.states:
            self.state = self.pool.states.new()
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
        """Drops the positions from ``length`` on, and frees the blocks that no longer hold any.

        Raises:
            ValueError: the model has recurrent layers, whose states cannot go back, and positions remain.
        """
        assert 0 <= length <= self.length
        if self.state is not None and length not in (0, self.length):
            raise ValueError(
                f"{self.length - length} of {self.length} positions cannot be dropped: the states of "
                "recurrent layers hold all of them; start again with a new cache"
            )
        if self.state is not None and length == 0:
            self.pool.states.deallocate([self.state])
            self.state = None
        keep = -(-length // self.pool.shape.block_size)
        self.pool.deallocate(self.blocks[keep:])
        del self.blocks[keep:]
        self.length = length

    def fork(self) -> SequenceBlocks:
        """Returns a copy that shares all blocks with this sequence until either of them writes.

        States are copied at once, as each step changes them.
        """
        other = SequenceBlocks(self.pool)
        other.blocks = self.pool.share(self.blocks)
        other.length = self.length
        other.state = None if self.state is None else self.pool.states.copy(self.state)
        return other

    def release(self) -> None:
        """Drops all positions and blocks."""
        self.truncate(0)
