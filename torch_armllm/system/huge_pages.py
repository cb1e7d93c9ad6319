"""Puts packed weights on huge pages.

Decoding reads every weight once a token.  On pages of 4 KB the CPU then walks page tables all the time, and
its prefetchers stop at each page's end: large layers are read half as fast again on pages of 2 MB.

Memory that a process has written is collapsed where it lies.  The mapping of a file is not, by most kernels:
there, other memory takes its place under the same addresses.
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
"""Environment variable; ``0`` leaves all pages as they are."""

_SYSTEM = Path("/sys/kernel/mm/transparent_hugepage")
_LARGEST = 4 << 20  # bytes of a huge page; where pages have 64 KB, huge ones have 512 MB
_LEAST = 1 << 18  # bytes of a tensor that is worth it
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25  # Linux 6.1: at once, whatever the pages hold now


def page_size() -> int:
    """Bytes of a huge page; 0 where there are none to be had."""
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
    """Moves the memory of tensors to huge pages, with what lies beside them on the same pages.

    Contents and addresses stay.  Only a hint: where the system cannot (before Linux 6.1, without free
    memory), pages stay as they are.  What lies in the private mapping of a file becomes memory of this
    process, unless there is too little of it: the file's pages, which processes share, are no longer used.

    Args:
        tensors: dense ones, on the CPU; those below 256 KB are left alone.

    Returns:
        Bytes that are on huge pages now, shared pages counted once.
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
    """Collapses pages at these addresses; returns those that it could not."""
    madvise = _madvise()
    return {start for start in sorted(starts) if madvise(start, page, _MADV_COLLAPSE) != 0}


def prefer_huge(tensor: Tensor) -> None:
    """Has the memory of a tensor that nothing was written to yet come in huge pages; only a hint."""
    page = page_size()
    if page and tensor.nbytes >= _LEAST:
        begin = -(-tensor.data_ptr() // page) * page
        size = (tensor.data_ptr() + tensor.nbytes - begin) // page * page
        if size > 0:
            _madvise()(begin, size, _MADV_HUGEPAGE)


def _madvise() -> Any:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise


def collapse_packed(model: nn.Module) -> int:
    """`collapse` for all packed weights of a model: the buffers whose names end in ``packed``."""
    return collapse(buffer for name, buffer in model.named_buffers() if name.endswith("packed"))
