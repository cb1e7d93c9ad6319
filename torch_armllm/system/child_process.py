"""Processes of this package that a process starts and talks to."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

_SECONDS_TO_END = 5.0


class ChildProcess:
    """A program of this package in a process of its own, which ends when its connection closes.

    Args:
        module: the program; its last argument is the descriptor of its end of the connection.
        cpus: on which it may run.
        arguments: of the program.
        files: descriptors that it inherits.

    Attributes:
        connection: to the process.
        process: the process.
    """

    def __init__(
        self, module: str, cpus: Sequence[int], arguments: Sequence[object] = (), files: Sequence[int] = ()
    ) -> None:
        ours, theirs = socket.socketpair()
        with theirs, _affinity(cpus):  # a process inherits the affinity of the thread that starts it
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, arguments), str(theirs.fileno())],
                pass_fds=[*files, theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self.connection = Connection(ours.detach())

    def reason(self) -> str:
        """Returns how the process has ended, whose connection is closed."""
        process = self.process
        try:
            code = process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            return f"process {process.pid} does not answer"
        if code < 0:
            return f"process {process.pid} was ended by signal {-code}"
        return f"process {process.pid} ended with status {code}"

    def close(self) -> None:
        """Ends the process; one that does not end by itself is killed."""
        self.connection.close()
        try:
            self.process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def _affinity(cpus: Sequence[int]) -> Iterator[None]:
    """Lets the calling thread run on these CPUs only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
