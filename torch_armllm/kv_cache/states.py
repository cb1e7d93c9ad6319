"""States of recurrent layers: their shapes, and a pool of slots that each hold all states of a sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torch_armllm.kv_cache.block_allocator import BlockAllocator


@dataclass(frozen=True)
class StateGroup:
    """States of equal shape.

    Attributes:
        layers: number of states that a sequence has in this group.
        sizes: shape of one state.
        dtype: dtype of its elements.
        accumulates: True for states that sum over all tokens, False for the last inputs of convolutions.
    """

    layers: int
    sizes: tuple[int, ...]
    dtype: torch.dtype
    accumulates: bool = False

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes of a sequence's states."""
        return self.layers * math.prod(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True)
class StateShape:
    """Shapes of the states of a model's recurrent layers; false if it has none."""

    groups: tuple[StateGroup, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.groups)

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes of all states of a sequence, whatever its length."""
        return sum(group.bytes_per_sequence for group in self.groups)

    @property
    def accumulated_dtype(self) -> torch.dtype | None:
        """Dtype of the states that sum over all tokens; None if there are none."""
        return next((group.dtype for group in self.groups if group.accumulates), None)

    def stored_as(self, dtype: torch.dtype) -> StateShape:
        """Returns the shapes with another dtype of the states that sum over all tokens."""
        return StateShape(
            tuple(replace(group, dtype=dtype) if group.accumulates else group for group in self.groups)
        )

    def tensors(self, slots: int) -> list[Tensor]:
        """Allocates states: one tensor ``(layers, slots, *sizes)`` for each group."""
        return [torch.empty(group.layers, slots, *group.sizes, dtype=group.dtype) for group in self.groups]


NO_STATES = StateShape()


class StatePool(BlockAllocator):
    """Allocator of state slots over tensors that grow by doubling.

    A slot is not cleared when it is allocated: ops do not read the slot of a sequence without earlier tokens.

    Attributes:
        shape: shapes of the states.
        tensors: see `StateShape.tensors`.
    """

    def __init__(self, shape: StateShape, slots: int = 1) -> None:
        super().__init__(slots)
        self.shape = shape
        self.tensors = shape.tensors(slots)

    def new(self) -> int:
        """Allocates a slot; grows the memory if none is free."""
        if not self.free:
            self._grow_memory()
        (slot,) = self.allocate(1)
        return slot

    def copy(self, slot: int) -> int:
        """Copies a slot to a new one and returns it."""
        target = self.new()
        for tensor in self.tensors:
            tensor[:, target] = tensor[:, slot]
        return target

    def _grow_memory(self) -> None:
        before = len(self)
        grown = self.shape.tensors(2 * before)
        for new, old in zip(grown, self.tensors, strict=True):
            new[:, :before] = old
        self.tensors = grown
        self.grow(2 * before)
