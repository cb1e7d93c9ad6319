"""Reference-counted allocation of numbered blocks."""

from __future__ import annotations

from collections.abc import Sequence


class BlockAllocator:
    """Allocates blocks by number and counts the references to each.

    `allocate`, `share` and `deallocate` take time in proportion to their blocks, not to the total.
    """

    def __init__(self, num_blocks: int) -> None:
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._references)

    @property
    def free(self) -> int:
        """Number of blocks without references."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Allocates free blocks; the caller holds one reference to each."""
        assert count <= len(self._free)
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            assert self._references[block] == 0
            self._references[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> list[int]:
        """Adds a reference to each block and returns the blocks as a new list."""
        for block in blocks:
            assert self._references[block] > 0
            self._references[block] += 1
        return list(blocks)

    def deallocate(self, blocks: Sequence[int]) -> None:
        """Drops a reference to each block, in order; a block without references becomes free."""
        for block in blocks:
            assert self._references[block] > 0
            self._references[block] -= 1
            if self._references[block] == 0:
                self._release(block)

    def is_shared(self, block: int) -> bool:
        """True if a block has several references, so that it must be copied before a write."""
        return self._references[block] > 1

    def grow(self, num_blocks: int) -> None:
        """Adds free blocks up to a total of ``num_blocks``; the present free blocks are allocated first."""
        before = len(self)
        self._references += [0] * (num_blocks - before)
        self._free = list(range(num_blocks - 1, before - 1, -1)) + self._free

    def reset(self) -> None:
        """Frees all blocks."""
        self._references = [0] * len(self)
        self._free = list(range(len(self) - 1, -1, -1))

    def _release(self, block: int) -> None:
        """Handles a block that lost its last reference."""
        self._free.append(block)
