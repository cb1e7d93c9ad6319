"""Replacement of mapped file pages by private memory at the same addresses."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

_MAPS = Path("/proc/self/maps")
_PIECE = 8  # pages per thread that exist twice during the copy
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_FAILED = ctypes.c_size_t(-1).value


def detachable(starts: Iterable[int], page: int, maps: str | None = None) -> set[int]:
    """Returns the pages that lie entirely within private mappings of files.

    Args:
        starts: addresses of pages.
        page: bytes per page.
        maps: text in the format of ``/proc/self/maps``; None: that file.
    """
    remaining = sorted(starts, reverse=True)
    detachable_pages: set[int] = set()
    for first, last in _private_files(_MAPS.read_text() if maps is None else maps):
        while remaining and remaining[-1] < first:
            remaining.pop()
        while remaining and remaining[-1] + page <= last:
            detachable_pages.add(remaining.pop())
    return detachable_pages


def detach(starts: Iterable[int], page: int) -> None:
    """Replaces mapped file pages by private memory, on huge pages if the system has them.

    Contents and addresses stay the same: other threads may read meanwhile, but must not write.  If the system
    refuses, the mapping stays.

    Args:
        starts: addresses of `detachable` pages, multiples of ``page``.
        page: bytes per huge page.
    """
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        list(
            pool.map(lambda piece: _detach(piece[0], page * len(piece), page), _pieces(sorted(starts), page))
        )


def _private_files(maps: str) -> Iterator[tuple[int, int]]:
    for line in maps.splitlines():
        addresses, access, _, _, inode, *_ = line.split()
        if inode != "0" and access[0] == "r" and access[3] == "p":
            first, _, last = addresses.partition("-")
            yield int(first, 16), int(last, 16)


def _pieces(starts: list[int], page: int) -> Iterator[list[int]]:
    """Yields runs of up to `_PIECE` adjacent pages."""
    piece: list[int] = []
    for start in starts:
        if piece and (start != piece[-1] + page or len(piece) == _PIECE):
            yield piece
            piece = []
        piece.append(start)
    if piece:
        yield piece


def _detach(start: int, size: int, page: int) -> None:
    system = ctypes.CDLL(None)
    word, flags = ctypes.c_size_t, ctypes.c_int
    system.mmap.restype = system.mremap.restype = word
    system.mmap.argtypes = (word, word, flags, flags, ctypes.c_int, ctypes.c_long)
    system.mremap.argtypes = (word, word, word, flags, word)
    system.madvise.argtypes = (word, word, flags)
    system.munmap.argtypes = (word, word)
    access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = system.mmap(0, size + page, access, kind, -1, 0)
    if address == _FAILED:
        return
    aligned = -(-address // page) * page  # huge pages need alignment
    system.madvise(aligned, size, mmap.MADV_HUGEPAGE)
    ctypes.memmove(aligned, start, size)
    moved = system.mremap(aligned, size, size, _MREMAP_MAYMOVE | _MREMAP_FIXED, start)
    if moved == _FAILED:
        system.munmap(aligned, size)
    system.munmap(address, aligned - address)
    system.munmap(aligned + size, address + page - aligned)
