"""Blocks of the paged KV cache: who holds them, and the memory behind them."""

from __future__ import annotations

from torch_armllm.kv_cache.shapes import Cache, CacheShape, LatentShape, MixedShape, Shape

__all__ = ["BlockPool", "CacheShape", "LatentShape", "MixedShape"]


class BlockPool:
    """Reference-counted blocks over tensors that grow by doubling.

    ``cache`` holds those of `Shape.tensors`, with layers as first dimension.
    """

    def __init__(self, shape: Shape, blocks: int = 64) -> None:
        self.shape = shape
        self.cache = shape.tensors(blocks)
        self._references = [0] * blocks
        self._free = list(range(blocks - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._references)

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def layer(self, index: int) -> Cache:
        """The tensors of one layer, views of all."""
        return self.shape.layer(self.cache, index)

    def _grow(self, least: int) -> None:
        before = len(self)
        after = max(2 * before, before + least)
        grown = self.shape.tensors(after)
        for new, old in zip(grown, self.cache, strict=True):
            if new is not None and old is not None:
                new[:, :before] = old
        self.cache = grown
        self._references += [0] * (after - before)
        self._free = list(range(after - 1, before - 1, -1)) + self._free

    def clear(self) -> None:
        """Makes all blocks free; what they hold stays in memory until it is overwritten."""
        self._references = [0] * len(self)
        self._free = list(range(len(self) - 1, -1, -1))

    def allocate(self, count: int) -> list[int]:
        """Takes blocks, growing the memory if it must."""
        if count > len(self._free):
            self._grow(count - len(self._free))
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            assert self._references[block] == 0
            self._references[block] = 1
        return taken

    def share(self, blocks: list[int]) -> list[int]:
        """Holds blocks once more and returns them as a list of their own."""
        for block in blocks:
            assert self._references[block] > 0
            self._references[block] += 1
        return list(blocks)

    def deallocate(self, blocks: list[int]) -> None:
        """Lets blocks go; those that nobody else holds become free."""
        for block in blocks:
            assert self._references[block] > 0
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)

    def is_shared(self, block: int) -> bool:
        """Whether more than one sequence holds a block."""
        return self._references[block] > 1

    def copy(self, block: int) -> int:
        """A block of one's own with the same keys and values; the shared one is let go."""
        (own,) = self.allocate(1)
        for tensor in self.cache:
            if tensor is not None:
                tensor[:, own] = tensor[:, block]
        self.deallocate([block])
        return own
