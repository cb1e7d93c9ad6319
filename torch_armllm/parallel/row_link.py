"""A connection between the leader and another rank, for bytes of their caches."""

from __future__ import annotations

import struct
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from socket import MSG_WAITALL, socket
from typing import Any

ROW_SECONDS = 300.0
"""Time after which a rank that does not answer is an error."""
_HEADER = struct.Struct("<qqq")
"""The two numbers of a title, and the bytes that follow."""

Title = tuple[int, int]
"""Two numbers that say what is sent."""


class RowLink:
    """Sends and receives bytes with a title, which the other end has to expect.

    Args:
        connection: a stream socket.
        seconds: time after which a rank that does not answer is an error.
    """

    def __init__(self, connection: socket, seconds: float = ROW_SECONDS) -> None:
        connection.settimeout(seconds)
        self._socket = connection
        self._sender: ThreadPoolExecutor | None = None
        self._sent: Future[None] | None = None

    def send(self, title: Title, memory: Any) -> None:
        """Sends the bytes of a buffer, and waits until the other end has read most of them.

        Raises:
            OSError: the other end has gone, or does not read.
        """
        view = memoryview(memory).cast("B")
        self._socket.sendall(_HEADER.pack(*title, len(view)))
        if view:
            self._socket.sendall(view)

    def send_later(self, title: Title, memory: Callable[[], Any]) -> None:
        """Sends the bytes of the buffer that a function returns, in a thread of its own, one after another.

        Raises:
            OSError: earlier ones could not be sent.
        """
        if self._sent is not None and self._sent.done():
            self._sent.result()
        if self._sender is None:
            self._sender = ThreadPoolExecutor(1, "armllm-rows")
        self._sent = self._sender.submit(lambda: self.send(title, memory()))

    def receive(self, title: Title, into: Any) -> None:
        """Waits for bytes, and fills a buffer with them.

        Raises:
            OSError: the other end has gone, does not answer, or sends something else.
        """
        view = memoryview(into).cast("B")
        if self._begin(title) != len(view):
            raise ConnectionError("a rank sends another number of bytes")
        self._fill(view)

    def receive_all(self, title: Title) -> bytearray:
        """Waits for bytes of any number, and returns them; see `receive`."""
        received = bytearray(self._begin(title))
        self._fill(memoryview(received))
        return received

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()

    def _begin(self, title: Title) -> int:
        header = bytearray(_HEADER.size)
        self._fill(memoryview(header))
        *found, size = _HEADER.unpack(header)
        if found != (expected := list(map(int, title))):
            raise ConnectionError(f"a rank sends {found} in place of {expected}")
        return int(size)

    def _fill(self, left: memoryview) -> None:
        while left:
            count = self._socket.recv_into(left, len(left), MSG_WAITALL)
            if count == 0:
                raise ConnectionError("the other rank has ended")
            left = left[count:]
