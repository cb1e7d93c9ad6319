"""Packed weights on huge pages.

Decoding reads every weight once per token.  On 4 KB pages the CPU then walks page tables all the time, and
its prefetchers stop at page boundaries: large layers are read 1.5 times as fast on 2 MB pages.

Anonymous memory is collapsed in place.  Most kernels do not collapse file mappings: they are replaced by
anonymous memory at the same addresses.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from torch_armllm.system.file_mappings import detach, detachable
from torch_armllm.system.host import free_memory

SETTING = "ARMLLM_HUGE_PAGES"
"""Environment variable; ``0`` disables huge pages."""

_SYSTEM = Path("/sys/kernel/mm/transparent_hugepage")
_LARGEST = 4 << 20  # bytes of a huge page; where pages have 64 KB, huge ones have 512 MB
_LEAST = 1 << 18  # bytes of the smallest tensor that is collapsed
_MADV_DONTNEED = 4
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25  # Linux 6.1: collapses at once


def page_size() -> int:
    """Returns the bytes per huge page; 0 if huge pages are unavailable."""
    if sys.platform != "linux" or os.environ.get(SETTING) == "0":
        return 0
    try:
        if "[never]" in (_SYSTEM / "enabled").read_text():
            return 0
        size = int((_SYSTEM / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 0
    return size if size <= _LARGEST else 0


def collapse(tensors: Iterable[Tensor]) -> int:
    """Moves the memory of tensors to huge pages, together with neighbors on the same pages.

    Contents and addresses stay the same.  This is only a hint: before Linux 6.1, or without free memory,
    pages stay small.  Private mappings of files become anonymous memory if there is enough of it; the file's
    pages, which processes share, are then no longer used.

    Args:
        tensors: dense CPU tensors; those below 256 KB are ignored.

    Returns:
        Bytes on huge pages now, shared pages counted once.
    """
    page = page_size()
    if page == 0:
        return 0
    starts: set[int] = set()
    for tensor in tensors:
        if tensor.nbytes >= _LEAST:
            starts.update(range(tensor.data_ptr() // page * page, tensor.data_ptr() + tensor.nbytes, page))
    left = _collapse(starts, page)
    mapped = detachable(left, page)
    if mapped and 2 * page * len(mapped) < free_memory():
        detach(mapped, page)
        left = left - mapped | _collapse(mapped, page)
    return page * (len(starts) - len(left))


def _collapse(starts: set[int], page: int) -> set[int]:
    """Collapses the pages at these addresses; returns those that failed."""
    madvise = _madvise()
    return {start for start in sorted(starts) if madvise(start, page, _MADV_COLLAPSE) != 0}


def prefer_huge(tensor: Tensor) -> None:
    """Asks for huge pages for the memory of a tensor that has not been written yet; only a hint."""
    page = page_size()
    if page and tensor.nbytes >= _LEAST:
        begin = -(-tensor.data_ptr() // page) * page
        size = (tensor.data_ptr() + tensor.nbytes - begin) // page * page
        if size > 0:
            _madvise()(begin, size, _MADV_HUGEPAGE)


def release_pages(tensors: Iterable[Tensor]) -> int:
    """Gives the pages of tensors back to the system; they are zero when they are read or written again.

    Args:
        tensors: dense CPU tensors in memory of this process alone, not in mapped files.

    Returns:
        Bytes given back: those of whole pages.
    """
    released, page = 0, os.sysconf("SC_PAGE_SIZE")
    for tensor in tensors:
        begin = -(-tensor.data_ptr() // page) * page
        size = (tensor.data_ptr() + tensor.nbytes - begin) // page * page
        if size > 0 and _madvise()(begin, size, _MADV_DONTNEED) == 0:
            released += size
    return released


def _madvise() -> Any:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise


def collapse_packed(model: nn.Module) -> int:
    """Calls `collapse` for all packed weights of a model: the buffers whose names end in ``packed``."""
    return collapse(buffer for name, buffer in model.named_buffers() if name.endswith("packed"))
