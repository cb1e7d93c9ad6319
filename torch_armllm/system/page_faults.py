"""Pages of memory that are mapped before they are written."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable

_MADV_POPULATE_WRITE = 23  # Linux 5.14


def map_pages(address: int, nbytes: int) -> None:
    """Has the system map memory, as the first write to each page would; contents stay as they are.

    This is only a hint: older systems ignore it.  Other threads may use the memory meanwhile.

    Args:
        address: of the first byte.
        nbytes: bytes from there on; those of the last page that is not covered are left out.
    """
    page = mmap.PAGESIZE
    begin, end = -(-address // page) * page, (address + nbytes) // page * page
    if begin < end and (madvise := _madvise()) is not None:
        madvise(begin, end - begin, _MADV_POPULATE_WRITE)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise
