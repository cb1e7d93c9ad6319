"""Exchanges and messages between ranks on several machines, by torch.distributed's gloo."""

from __future__ import annotations

import ctypes
import logging
from array import array
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_armllm.ops.collective import (
    close_communicator,
    communicator_buffers,
    communicator_memory,
    open_communicator,
)
from torch_armllm.parallel.shared_memory import BUFFER_BYTES

_FIRST_BYTES = 16 << 10
"""Bytes of every message's first part, which says if there is more: most steps take one broadcast."""

_logger = logging.getLogger(__name__)


class NetworkExchange:
    """Gathers the columns of all ranks over a network.

    Args:
        rank: number of this process.
        ranks: number of ranks.
        group: process group of the ranks.

    Attributes:
        communicator: handle for plans.
    """

    def __init__(self, rank: int, ranks: int, group: Any) -> None:
        memory = communicator_memory(ranks, BUFFER_BYTES)
        self._buffers = communicator_buffers(memory, ranks, BUFFER_BYTES)
        self._rank, self._group = rank, group
        # kept: C++ calls it
        self._callback = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(self._exchange)
        address = ctypes.cast(self._callback, ctypes.c_void_p).value
        assert address is not None
        self.communicator = open_communicator(memory, rank, ranks, BUFFER_BYTES, network=address)

    def _exchange(self, number: int, count: int) -> int:
        try:
            self._share(list(self._buffers[:, number % 2, :count]))
        except Exception:  # of any kind: C++ raises an error in its place
            _logger.exception("rank %d cannot exchange columns with the others", self._rank)
            return 0
        return 1

    def _share(self, parts: list[Tensor]) -> None:
        """Sends this rank's part to all others, one rank after another.

        gloo's ``all_gather`` of 4 KB takes 0.6 to 0.9 ms between two processes of one machine, where a send
        and a receive in turn take 0.14 ms.
        """
        if len(parts) == 2:
            other = 1 - self._rank
            if self._rank == 0:
                dist.send(parts[0], 1, group=self._group)
                dist.recv(parts[other], other, group=self._group)
            else:
                dist.recv(parts[other], other, group=self._group)
                dist.send(parts[1], 0, group=self._group)
            return
        for rank, part in enumerate(parts):
            dist.broadcast(part, rank, group=self._group)

    def close(self) -> None:
        """Closes the communicator; plans must not run any more."""
        close_communicator(self.communicator)


class NetworkMailbox:
    """Messages of rank 0 to all others; see `torch_armllm.parallel.mailbox.Mailbox`.

    Args:
        group: process group of the ranks, which may wait for days.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._first = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
        self._whole = self._first

    def post(self, numbers: array[int], tensors: Iterable[Tensor] = ()) -> None:
        """Sends int64 numbers and, after them, the contents of contiguous tensors."""
        parts = [torch.frombuffer(numbers, dtype=torch.uint8)]
        parts += [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
        message = torch.cat(parts)
        room = _FIRST_BYTES - 8
        self._first[:8].view(torch.int64).fill_(len(message))
        self._first[8 : 8 + min(room, len(message))] = message[:room]
        dist.broadcast(self._first, 0, group=self._group)
        if len(message) > room:
            dist.broadcast(message[room:].clone(), 0, group=self._group)

    def receive(self) -> int:
        """Waits for the next message and returns its address; it is valid until the next call."""
        dist.broadcast(self._first, 0, group=self._group)
        size, room = int(self._first[:8].view(torch.int64)), _FIRST_BYTES - 8
        self._whole = self._first[8:]
        if size > room:
            rest = torch.empty(size - room, dtype=torch.uint8)
            dist.broadcast(rest, 0, group=self._group)
            self._whole = torch.cat([self._first[8:], rest])
        return self._whole.data_ptr()

    def done(self, rank: int) -> None:
        """Does nothing: a message has memory of its own."""
