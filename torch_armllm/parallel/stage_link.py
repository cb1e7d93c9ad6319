"""Connections of a pipeline stage to the one before it and the one after it."""

from __future__ import annotations

import contextlib
import struct
import threading
from queue import SimpleQueue
from socket import MSG_WAITALL, SHUT_RDWR, socket, socketpair
from typing import Any

import torch
from torch import Tensor

_HEADER = struct.Struct("<qqq")
"""Rows, columns, and the number of the dtype."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_KEPT = 16
"""Sizes of rows whose memory is kept."""


class StageLink:
    """Receives rows of hidden states from one stage and sends others to the next one.

    Rows are sent by a thread of its own: a stage that computes does not read, and stages in a ring that all
    waited for the next one to read would wait for ever.

    Args:
        previous: socket from the stage before; the last one is before the first.
        following: socket to the stage after; it may be the same.
        seconds: time after which a stage that does not answer is an error.
    """

    def __init__(self, previous: socket, following: socket, seconds: float) -> None:
        self._previous, self._following = previous, following
        self._seconds = seconds
        for each in {previous, following}:
            each.settimeout(seconds)
        self._memory: dict[tuple[int, int, int], Tensor] = {}
        self._to_send: SimpleQueue[Tensor | None] = SimpleQueue()
        self._error: Exception | None = None
        self._sender = threading.Thread(target=self._send_all, name="armllm-stage", daemon=True)
        self._sender.start()

    def send(self, rows: Tensor) -> None:
        """Sends a copy of rows ``(R, columns)`` without waiting for the next stage.

        Raises:
            RuntimeError: the next stage has ended, or has not read earlier rows in time.
        """
        if self._error is not None:
            raise RuntimeError(f"the connection to the next stage failed: {self._error}") from self._error
        self._to_send.put(rows.detach().clone(memory_format=torch.contiguous_format))

    def receive(self, rows: int) -> Tensor:
        """Waits for rows ``(rows, columns)``; they are valid until the next call.

        Raises:
            RuntimeError: the stage before has ended, does not answer, or sends another number of rows.
        """
        header = _HEADER.unpack(self._read(bytearray(_HEADER.size)))
        count, columns, dtype = header
        if count != rows or not 0 <= dtype < len(_DTYPES):
            raise RuntimeError(f"the stage before sends {count} rows of a step with {rows}")
        memory = self._memory.pop(header, None)
        if memory is None:
            memory = torch.empty(count, columns, dtype=_DTYPES[dtype])
            if len(self._memory) == _KEPT:
                del self._memory[next(iter(self._memory))]  # the least recently used
        self._memory[header] = memory
        if memory.numel():
            self._read(_bytes_of(memory))
        return memory

    def close(self) -> None:
        """Ends the connections; stages that wait for rows get an error."""
        self._to_send.put(None)
        for each in {self._previous, self._following}:
            with contextlib.suppress(OSError):  # closed by the other end
                each.shutdown(SHUT_RDWR)
        self._sender.join()
        for each in {self._previous, self._following}:
            each.close()

    def _read(self, memory: Any) -> Any:
        left = memoryview(memory).cast("B")
        while left:
            try:
                count = self._previous.recv_into(left, len(left), MSG_WAITALL)
            except TimeoutError:
                raise RuntimeError(f"the stage before has not answered for {self._seconds:g} s") from None
            except OSError as error:
                raise RuntimeError(f"the connection to the stage before failed: {error}") from error
            if count == 0:
                raise RuntimeError("the stage before has ended")
            left = left[count:]
        return memory

    def _send_all(self) -> None:
        while (rows := self._to_send.get()) is not None:
            if self._error is not None:
                continue
            try:
                self._following.sendall(_HEADER.pack(*rows.shape, _DTYPES.index(rows.dtype)))
                if rows.numel():
                    self._following.sendall(_bytes_of(rows))
            except OSError as error:
                self._error = error


def ring(stages: int) -> list[tuple[socket, socket]]:
    """Returns the sockets of each stage of a machine: from the stage before, and to the one after it."""
    pairs = [socketpair() for _ in range(stages)]
    return [(pairs[number - 1][1], pairs[number][0]) for number in range(stages)]


def _bytes_of(rows: Tensor) -> Any:
    return rows.view(-1).view(torch.uint8).numpy()
