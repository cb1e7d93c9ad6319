"""Tensor parallel ranks as threads of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from torch_armllm.ops.collective import close_communicator, communicator_bytes, open_communicator

T = TypeVar("T")


@contextmanager
def communicators(
    ranks: int, buffer_bytes: int = 1 << 16, timeout: float = 60.0
) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """Opens a communicator for each rank; yields the memory that they share, and their handles."""
    size = communicator_bytes(ranks, buffer_bytes)
    memory = aligned_zeros(size)
    handles = [open_communicator(memory, rank, ranks, buffer_bytes, timeout) for rank in range(ranks)]
    try:
        yield memory, handles
    finally:
        for handle in handles:
            close_communicator(handle)


def aligned_zeros(size: int) -> torch.Tensor:
    """Returns zeros (uint8) that begin on a cache line."""
    whole = torch.zeros(size + 64, dtype=torch.uint8)
    return whole[-whole.data_ptr() % 64 :][:size]


def at_once(ranks: int, work: Callable[[int], T]) -> list[T]:
    """Calls a function with the number of each rank, all at the same time; returns the results."""
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(work, range(ranks)))
