"""Timing of the sides of a comparison in turn, so that noise on the machine affects all of them."""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import cycle
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor

ROUNDS = 9
MIN_SECONDS = 0.006  # seconds that one side runs in a round
COLD_BYTES = 160 << 20  # copies of what is read that together exceed the last-level cache by far

T = TypeVar("T")


def in_turn(sides: Mapping[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, float]:
    """Returns the median seconds per call of each side."""
    return {name: median(seconds) for name, seconds in by_round(sides, rounds).items()}


def by_round(sides: Mapping[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Returns the seconds per call of each side; a round runs each side for a few milliseconds."""
    calls = {}
    for name, side in sides.items():
        side()
        start = time.perf_counter()
        side()
        calls[name] = max(1, round(MIN_SECONDS / max(1e-7, time.perf_counter() - start)))
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            start = time.perf_counter()
            for _ in range(calls[name]):
                side()
            times[name].append((time.perf_counter() - start) / calls[name])
    return times


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Sets the number of torch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def on_huge_pages(tensor: Tensor) -> Tensor:
    """Copies a tensor to huge pages, where TLB misses are rare; to ordinary pages if there are no others."""
    page = 1 << 21
    memory = mmap.mmap(-1, tensor.nbytes + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    start = -flat.data_ptr() % page
    copy = flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


def cold(make: Callable[[], T], size: int) -> Callable[[], T]:
    """Returns a source of copies of ``size`` bytes, another at each call, that exceed the cache together."""
    copies = cycle([make() for _ in range(max(1, COLD_BYTES // size))])
    return lambda: next(copies)
