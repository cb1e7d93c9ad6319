"""Experts that stay in files: an address range for all of them, and a cache of those that are in memory."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from torch_armllm.ops import LIBRARY

_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0


class StoredWeight(NamedTuple):
    """Stacked weights of a layer's experts in a file, where they are contiguous.

    Attributes:
        memory: as `reserve` returned it.
        file: of the weights.
        offset: of the first byte in the file.
    """

    memory: Tensor
    file: Path
    offset: int


class ExpertCounts(NamedTuple):
    """Counts of an `ExpertStore` since it was opened."""

    hits: int
    """Needed experts that were in memory."""
    misses: int
    """Needed experts that were not."""
    bytes_read: int
    waited: int
    """Nanoseconds that steps waited for reads."""
    resident: int
    """Bytes of the experts in memory now."""
    budget: int
    """Bytes that they may take."""

    @property
    def unfilled(self) -> int:
        """Bytes that experts will still take."""
        return self.budget - self.resident


class ExpertStore:
    """A cache of the experts of all layers.

    While it is alive, `int4_moe` and plans read the experts that they need into their weights' memory.

    Args:
        budget: bytes that experts may take; all experts of each layer must fit.
        layers: gate and up, and down, of each layer.

    Raises:
        RuntimeError: a file cannot be opened, or the budget does not hold a layer.
    """

    def __init__(self, budget: int, layers: Sequence[tuple[StoredWeight, StoredWeight]]) -> None:
        weights = [weight for layer in layers for weight in layer]
        files = list(dict.fromkeys(weight.file for weight in weights))
        positions = [number for w in weights for number in (files.index(w.file), w.offset)]
        self._handle: int = torch.ops.armllm.experts_open(
            budget, [str(file) for file in files], [weight.memory for weight in weights], positions
        )
        self._stored = {weight.memory.data_ptr(): weight for weight in weights}
        weakref.finalize(self, _close(), self._handle)

    def stored(self, tensor: Tensor) -> StoredWeight | None:
        """Returns the place of a plan's constant in a file; None if it is in memory as a whole."""
        return self._stored.get(tensor.data_ptr())

    def require(self, layer: int, experts: Sequence[int]) -> None:
        """Makes experts of a layer resident until the next call.

        Raises:
            RuntimeError: they cannot be read.
        """
        torch.ops.armllm.experts_require(self._handle, layer, list(experts))

    def counts(self) -> ExpertCounts:
        """Returns what has happened so far."""
        return ExpertCounts(*torch.ops.armllm.experts_counts(self._handle))

    def resident(self) -> list[int]:
        """Returns the numbers of the experts in memory, counted over all layers."""
        numbers: list[int] = torch.ops.armllm.experts_resident(self._handle)
        return numbers


def reserve(experts: int, panels: int, panel_bytes: int) -> Tensor:
    """Returns uint8 ``(experts, panels, panel_bytes)``, each expert on pages of its own.

    Pages take no memory before they are written.
    """
    stride = stored_bytes(panels, panel_bytes)
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = mmap.mmap(-1, experts * stride, flags=anonymous)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page would hold parts of several experts
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    return flat.as_strided((experts, panels, panel_bytes), (stride, panel_bytes, 1))


def stored_bytes(panels: int, panel_bytes: int) -> int:
    """Returns the bytes that an expert's weights take in memory: whole pages."""
    return -(-panels * panel_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


@functools.cache
def _close() -> Callable[[int], None]:
    """Returns the function that closes a store; an op would be recorded by a trace that is under way."""
    close = LIBRARY.armllm_experts_close
    close.argtypes, close.restype = (ctypes.c_int64,), None
    return close
