"""Returning freed memory to the system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


@functools.cache
def _trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):  # not glibc: musl returns freed memory by itself
        return None
    return trim


def release_free_memory() -> None:
    """Returns freed memory to the system, if the allocator can.

    glibc keeps the memory that a thread frees for later allocations, and raises its mmap threshold as large
    tensors are freed: without a trim, the pages of the float weights would stay with the quantized model.
    """
    trim = _trim()
    if trim is not None:
        trim(0)
