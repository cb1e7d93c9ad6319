"""Tensor parallel ranks as threads of one process."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from torch_armllm.ops.collective import close_communicator, communicator_memory, open_communicator

T = TypeVar("T")


@contextmanager
def communicators(
    ranks: int, buffer_bytes: int = 1 << 16, timeout: float = 60.0, shared_bytes: int = 0
) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """Opens a communicator for each rank; yields the memory that they share, and their handles."""
    memory = communicator_memory(ranks, buffer_bytes, shared_bytes)
    handles = [open_communicator(memory, rank, ranks, buffer_bytes, timeout) for rank in range(ranks)]
    try:
        yield memory, handles
    finally:
        for handle in handles:
            close_communicator(handle)


@contextmanager
def network_communicators(
    ranks: int, buffer_bytes: int = 1 << 16, timeout: float = 60.0
) -> Iterator[list[int]]:
    """Opens a communicator for each rank, which share no memory; yields their handles."""
    sockets: list[list[socket.socket | None]] = [[None] * ranks for _ in range(ranks)]
    for a, b in itertools.combinations(range(ranks), 2):
        sockets[a][b], sockets[b][a] = socket.socketpair()
    handles = []
    for rank, row in enumerate(sockets):
        files = [-1 if each is None else each.fileno() for each in row]
        memory = communicator_memory(ranks, buffer_bytes)
        handles.append(open_communicator(memory, rank, ranks, buffer_bytes, timeout, files))
    try:
        yield handles
    finally:
        for handle in handles:
            close_communicator(handle)
        for each in itertools.chain(*sockets):
            if each is not None:
                each.close()


def at_once(ranks: int, work: Callable[[int], T]) -> list[T]:
    """Calls a function with the number of each rank, all at the same time; returns the results."""
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(work, range(ranks)))
