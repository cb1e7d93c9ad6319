"""Memory between pages that no one may read or write.

A tensor ends at such a page, or begins after one, so a kernel that leaves it ends the process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass

import torch
from torch import Tensor

_PAGE = mmap.PAGESIZE
LIMIT = 1 << 26
"""Bytes of the largest tensor."""
_BESIDE = 64
"""Bytes on the open side of a tensor that must stay as they are."""


def _protect(memory: mmap.mmap, start: int) -> None:
    """Takes all rights from a page."""
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + start
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(_PAGE), 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@dataclass
class Region:
    """Bytes of one tensor, and some beside it."""

    view: memoryview
    begin: int
    end: int
    low: int
    high: int

    def outside(self) -> bytes:
        """Returns the bytes beside the tensor."""
        return bytes(self.view[self.low : self.begin]) + bytes(self.view[self.end : self.high])

    def inside(self) -> bytes:
        """Returns the bytes of the tensor, gaps between its rows included."""
        return bytes(self.view[self.begin : self.end])


class GuardedMemory:
    """Slots of memory with a guard page before and after each.

    Args:
        slots: number of slots.
        size: bytes of the largest tensor.
    """

    def __init__(self, slots: int = 24, size: int = 1 << 18) -> None:
        self._size = -(-(size + _BESIDE) // _PAGE) * _PAGE
        self._step = self._size + _PAGE
        self._memory = mmap.mmap(-1, slots * self._step + _PAGE)
        self._view = memoryview(self._memory)
        for slot in range(slots + 1):
            _protect(self._memory, slot * self._step)
        self._slots = [
            torch.frombuffer(
                self._memory, dtype=torch.uint8, count=self._size, offset=slot * self._step + _PAGE
            )
            for slot in range(slots)
        ]
        self._used = 0

    def clear(self) -> None:
        """Frees all slots."""
        self._used = 0

    def take(self, size: int, dtype: torch.dtype, at_end: bool) -> tuple[Tensor, Region | None]:
        """Returns a vector of a slot of its own, and its region; None if the slots are too small or few."""
        count = size * dtype.itemsize
        if count > LIMIT:
            raise OverflowError(f"{count} bytes are too many for a test")
        if count > self._size - _BESIDE or self._used == len(self._slots):
            return torch.empty(size, dtype=dtype), None
        slot = self._slots[self._used]
        start = self._used * self._step + _PAGE
        self._used += 1
        first = self._size - count if at_end else 0
        begin, end = start + first, start + first + count
        low, high = (begin - _BESIDE, end) if at_end else (begin, end + _BESIDE)
        return slot[first : first + count].view(dtype), Region(self._view, begin, end, low, high)
