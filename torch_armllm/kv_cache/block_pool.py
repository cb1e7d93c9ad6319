"""Blocks of the paged KV cache, with their memory."""

from __future__ import annotations

from torch_armllm.kv_cache.block_allocator import BlockAllocator
from torch_armllm.kv_cache.shapes import Cache, CacheShape, LatentShape, MixedShape, Shape
from torch_armllm.kv_cache.states import StatePool

__all__ = ["BlockPool", "CacheShape", "LatentShape", "MixedShape"]


class BlockPool(BlockAllocator):
    """A block allocator over tensors that grow by doubling.

    Attributes:
        shape: shape of the cache.
        cache: tensors made by `Shape.tensors`; layers are their first dimension.
        states: slots of the recurrent layers' states.
    """

    def __init__(self, shape: Shape, blocks: int = 64) -> None:
        super().__init__(blocks)
        self.shape = shape
        self.cache = shape.tensors(blocks)
        self.states = StatePool(shape.states)

    def reset(self) -> None:
        """Frees all blocks and state slots."""
        super().reset()
        self.states.reset()

    def layer(self, index: int) -> Cache:
        """Returns the tensors of one layer, as views."""
        return self.shape.layer(self.cache, index)

    def allocate(self, count: int) -> list[int]:
        """Allocates free blocks; grows the memory if there are too few."""
        if count > len(self._free):
            self._grow_memory(count - len(self._free))
        return super().allocate(count)

    def _grow_memory(self, missing: int) -> None:
        before = len(self)
        after = max(2 * before, before + missing)
        grown = self.shape.tensors(after)
        for new, old in zip(grown, self.cache, strict=True):
            if new is not None and old is not None:
                new[:, :before] = old
        self.cache = grown
        self.grow(after)

    def copy(self, block: int) -> int:
        """Copies a block to a new one, drops one reference to the original and returns the copy."""
        (target,) = self.allocate(1)
        for tensor in self.cache:
            if tensor is not None:
                tensor[:, target] = tensor[:, block]
        self.deallocate([block])
        return target
