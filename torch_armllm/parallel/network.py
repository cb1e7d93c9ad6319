"""Exchanges and messages between ranks on several machines."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from socket import MSG_WAITALL, socket
from typing import Any

import torch
from torch import Tensor

from torch_armllm.ops.collective import close_communicator, communicator_memory, open_communicator
from torch_armllm.parallel.shared_memory import BUFFER_BYTES


class NetworkExchange:
    """Gathers the columns of all ranks over a network.

    Args:
        rank: number of this process.
        sockets: connections to the ranks, which have to stay open; None for this rank.
        seconds: time after which a rank that does not answer is an error.

    Attributes:
        communicator: handle for plans.
    """

    def __init__(self, rank: int, sockets: Sequence[socket | None], seconds: float) -> None:
        ranks = len(sockets)
        memory = communicator_memory(ranks, BUFFER_BYTES)
        files = [-1 if each is None else each.fileno() for each in sockets]
        self.communicator = open_communicator(memory, rank, ranks, BUFFER_BYTES, seconds, files)

    def close(self) -> None:
        """Closes the communicator; plans must not run any more."""
        close_communicator(self.communicator)


class NetworkMailbox:
    """Messages of rank 0 to all others; see `torch_armllm.parallel.mailbox.Mailbox`.

    Args:
        sockets: connections to the ranks; None for this rank.
    """

    def __init__(self, sockets: Sequence[socket | None]) -> None:
        self._sockets = {rank: each for rank, each in enumerate(sockets) if each is not None}
        self._message = torch.empty(0, dtype=torch.uint8)

    def post(self, numbers: array[int], tensors: Iterable[Tensor] = ()) -> None:
        """Sends int64 numbers and, after them, the contents of contiguous tensors.

        Raises:
            RuntimeError: a rank has ended, or its machine has gone.
        """
        parts = [numbers.tobytes()]
        parts += [tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]
        size = sum(map(len, parts))
        message = b"".join([array("q", [size]).tobytes(), *parts])
        for rank, each in self._sockets.items():
            try:
                each.sendall(message)
            except OSError as error:
                raise RuntimeError(f"the connection to rank {rank} failed: {error}") from error

    def receive(self) -> int:
        """Waits for the next message and returns its address; it is valid until the next call.

        Raises:
            RuntimeError: rank 0 has ended.
        """
        size = torch.empty(1, dtype=torch.int64)
        self._fill(size.view(torch.uint8))
        self._message = torch.empty(int(size), dtype=torch.uint8)
        self._fill(self._message)
        return self._message.data_ptr()

    def done(self, rank: int) -> None:
        """Does nothing: a message has memory of its own."""

    def _fill(self, memory: Tensor) -> None:
        left: Any = memoryview(memory.numpy())  # type: ignore[arg-type]
        while left:
            try:
                count = self._sockets[0].recv_into(left, len(left), MSG_WAITALL)
            except OSError as error:
                raise RuntimeError(f"the connection to rank 0 failed: {error}") from error
            if count == 0:
                raise RuntimeError("rank 0 has ended")
            left = left[count:]
