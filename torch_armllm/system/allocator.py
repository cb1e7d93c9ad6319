"""Giving memory that is free back to the system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


@functools.cache
def _trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):  # not glibc: musl gives memory back by itself
        return None
    return found


def release_free_memory() -> None:
    """Returns freed memory to the system, where the allocator can.

    glibc keeps what a thread freed for that thread to use again, and raises the size from which it maps
    memory anew as tensors come and go: a quantized model would go on holding its float weights' pages.
    """
    trim = _trim()
    if trim is not None:
        trim(0)
