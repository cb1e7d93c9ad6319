"""Exchanges between the ranks of a tensor parallel group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_armllm.ops.declare import op

__all__ = [
    "close_communicator",
    "communicator_bytes",
    "communicator_memory",
    "gather_columns",
    "open_communicator",
    "rank_of",
    "shared_bytes_of",
]

_LINE = 64
_open: dict[int, _Opened] = {}
"""Open communicators by handle."""


class _Opened(NamedTuple):
    rank: int
    shared_bytes: int


def communicator_bytes(ranks: int, buffer_bytes: int, shared_bytes: int = 0) -> int:
    """Returns the bytes of memory that the ranks of a communicator share.

    Args:
        ranks: number of ranks.
        buffer_bytes: bytes of each of a rank's two buffers.
        shared_bytes: of an arena for rows that all ranks read; 0: ranks copy from each other's buffers.
    """
    return _LINE * (1 + ranks) + 2 * ranks * buffer_bytes + shared_bytes


def communicator_memory(ranks: int, buffer_bytes: int, shared_bytes: int = 0) -> Tensor:
    """Returns memory of this process for a communicator: uint8 zeros that begin on a cache line."""
    size = communicator_bytes(ranks, buffer_bytes, shared_bytes)
    whole = torch.zeros(size + _LINE, dtype=torch.uint8)
    return whole[-whole.data_ptr() % _LINE :][:size]


def open_communicator(
    memory: Tensor,
    rank: int,
    ranks: int,
    buffer_bytes: int,
    timeout: float = 300.0,
    sockets: Sequence[int] = (),
) -> int:
    """Opens a communicator and returns its handle.

    Args:
        memory: uint8, `communicator_bytes` of them that begin on a cache line: shared by all ranks, and 0 at
            first.  With ``sockets`` it is this process's own.  More of it is the shared arena of plans.
        rank: number of this process.
        ranks: number of processes, 64 at most.
        buffer_bytes: bytes of each of a rank's two buffers, a multiple of 64; larger exchanges take several
            rounds.
        timeout: seconds after which a rank that does not answer is an error.
        sockets: descriptors of connected stream sockets, one to each rank, and any number for this one: for
            ranks on several machines, which share no memory.  They have to stay open.

    Raises:
        RuntimeError: a size is out of range, or the memory too small.
    """
    handle: int = torch.ops.armllm.communicator_open(
        memory, rank, ranks, buffer_bytes, int(timeout * 1000), list(sockets)
    )
    _open[handle] = _Opened(rank, 0 if sockets else memory.numel() - communicator_bytes(ranks, buffer_bytes))
    return handle


def rank_of(communicator: int) -> int:
    """Returns the number of this process in a communicator."""
    return _open[communicator].rank


def shared_bytes_of(communicator: int) -> int:
    """Returns the size of the arena that the ranks of a communicator share; 0 if they share none."""
    opened = _open.get(communicator)
    return opened.shared_bytes if opened else 0


def close_communicator(communicator: int) -> None:
    """Closes a communicator; plans that use it keep it alive."""
    torch.ops.armllm.communicator_close(communicator)
    _open.pop(communicator, None)


@op(lambda a: a.x.new_empty((*a.x.shape[:-1], sum(a.columns))))
def gather_columns(x: Tensor, communicator: int, columns: Sequence[int]) -> Tensor:
    """Returns the columns of all ranks, one rank after another; every rank has to call it.

    Args:
        x: ``(..., columns[rank])`` in float32, bfloat16 or float16; all ranks have the same rows.
        communicator: handle, see `open_communicator`.
        columns: number of columns of each rank.

    Returns:
        ``(..., sum(columns))``, contiguous; the same on every rank.

    Raises:
        RuntimeError: sizes do not fit, or a rank has failed or does not answer.
    """
