"""Tensor parallel ranks as threads of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from torch_armllm.ops.collective import close_communicator, communicator_memory, open_communicator

T = TypeVar("T")


@contextmanager
def communicators(
    ranks: int, buffer_bytes: int = 1 << 16, timeout: float = 60.0
) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """Opens a communicator for each rank; yields the memory that they share, and their handles."""
    memory = communicator_memory(ranks, buffer_bytes)
    handles = [open_communicator(memory, rank, ranks, buffer_bytes, timeout) for rank in range(ranks)]
    try:
        yield memory, handles
    finally:
        for handle in handles:
            close_communicator(handle)


def at_once(ranks: int, work: Callable[[int], T]) -> list[T]:
    """Calls a function with the number of each rank, all at the same time; returns the results."""
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(work, range(ranks)))
