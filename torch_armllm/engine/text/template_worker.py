"""The child process that renders chat templates; see `template_process`.

It reads and writes messages on the socket that is its standard input: eight bytes with the length, then JSON.
It imports neither torch nor the model.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import Any

_HEADER = 8
"""Bytes of a message's length."""


def send(connection: socket.socket, content: Any) -> None:
    """Sends a message.

    Raises:
        TypeError, ValueError: JSON cannot hold the content.
    """
    data = json.dumps(content).encode()
    connection.sendall(len(data).to_bytes(_HEADER, "little") + data)


def receive(connection: socket.socket) -> Any:
    """Receives a message.

    Raises:
        EOFError: the other side has closed the connection.
    """
    size = int.from_bytes(_receive_bytes(connection, _HEADER), "little")
    return json.loads(_receive_bytes(connection, size))


def serve(seconds: int, memory: int, characters: int) -> None:
    """Renders until the parent closes the connection.

    Args:
        seconds: after which a template that still renders ends the process.
        memory: bytes that templates may take beyond those of the process when it is ready.
        characters: longest text that is sent back.
    """
    connection = socket.socket(fileno=os.dup(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    # the import takes a second; this process starts before the first template is known
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit_memory(memory)
    send(connection, "ready")
    while True:
        try:
            request = receive(connection)
        except (EOFError, OSError):
            return
        # ends the process even within one long call, and where no parent is left to end it
        signal.alarm(seconds)
        try:
            (text,), _ = render_jinja_template(**request)
            answer = {"text": text} if len(text) <= characters else {"size": len(text)}
        except MemoryError:
            answer = {"memory": memory}
        except Exception as error:
            answer = {"error": type(error).__name__, "message": str(error)[:10_000]}
        signal.alarm(0)
        send(connection, answer)


def _limit_memory(more: int) -> None:
    """Bounds the address space, where the system can tell how large it is."""
    import resource

    try:
        with open("/proc/self/statm") as status:
            pages = int(status.read().split()[0])
    except OSError:  # not Linux
        return
    limit = pages * resource.getpagesize() + more
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _receive_bytes(connection: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = connection.recv(min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))
