"""The processes of the other tensor parallel ranks, as the leader sees them."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from torch_armllm.engine.errors import RankFailedError
from torch_armllm.engine.execution.rank_leader import OnFailure
from torch_armllm.parallel.shared_memory import GroupMemory
from torch_armllm.parallel.silent_ranks import SilentRanks

_SECONDS_TO_END = 5.0
_SECONDS_TO_TELL = 1.0
"""Time that a rank has to write its stack."""
_POLLS = 30
"""Polls in a row after which a rank is silent."""

logger = logging.getLogger(__name__)


class RankProcesses:
    """Starts a process for each rank but 0, and watches them.

    Args:
        cores: CPUs of each rank, that of this process included.
        settings: of the model, for `torch_armllm.llm.rank_process`.

    Attributes:
        memory: shared by all ranks.
        seconds_to_answer: time after which a rank that holds up the others in a step is killed.
    """

    seconds_to_answer = 60.0

    def __init__(self, cores: Sequence[Sequence[int]], settings: Mapping[str, Any]) -> None:
        self.memory = GroupMemory(len(cores))
        self._reasons: list[str] = []
        self._on_failure: list[weakref.WeakMethod[OnFailure]] = []
        self._closed = threading.Event()
        self._finder: threading.Thread | None = None
        self._stacks = {rank: os.memfd_create(f"stacks of rank {rank}") for rank in range(1, len(cores))}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._connections: dict[int, Connection] = {}
        for rank in range(1, len(cores)):
            self._start(rank, cores, settings)

    def _start(self, rank: int, cores: Sequence[Sequence[int]], settings: Mapping[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        files = self.memory.file, theirs.fileno(), self._stacks[rank]
        arguments = [str(n) for n in (rank, len(cores), *files)]
        with theirs, _affinity(cores[rank]):  # a process inherits the affinity of the thread that starts it
            self._processes[rank] = subprocess.Popen(
                [sys.executable, "-m", "torch_armllm.llm.rank_process", *arguments],
                pass_fds=files,
                stdin=subprocess.DEVNULL,
            )
        self._connections[rank] = Connection(ours.detach())
        self._connections[rank].send(settings)

    def send(self, message: Any) -> None:
        """Sends a message to all ranks."""
        for connection in self._connections.values():
            connection.send(message)

    def receive(self) -> list[Any]:
        """Waits for a message of each rank, and returns them.

        Raises:
            ValueError: a rank has failed; the message says why.
        """
        return [self._receive(rank) for rank in self._connections]

    def _receive(self, rank: int) -> Any:
        try:
            kind, content = self._connections[rank].recv()
        except (EOFError, OSError):
            kind, content = "failed", self._end_of(rank)
        if kind == "failed":
            self.memory.fail(rank)
            raise ValueError(f"tensor parallel rank {rank} failed: {content}")
        return content

    def watch(self) -> None:
        """Begins to watch the processes: one that ends, or does not answer, ends the exchanges of all."""
        for rank in self._connections:
            threading.Thread(target=self._watch, args=[rank], name=f"armllm-rank-{rank}", daemon=True).start()
        self._finder = threading.Thread(target=self._find_silent, name="armllm-silent-ranks", daemon=True)
        self._finder.start()

    def _watch(self, rank: int) -> None:
        try:
            _, reason = self._connections[rank].recv()
        except (EOFError, OSError):
            reason = self._end_of(rank)
        if not self._closed.is_set():
            self._fail(rank, reason)

    def _fail(self, rank: int, reason: str) -> None:
        self._reasons.append(f"tensor parallel rank {rank} has failed: {reason}")
        self.memory.fail(rank)
        for kept in self._on_failure:
            if (method := kept()) is not None:
                method(RankFailedError(self._reasons[0]))

    def _find_silent(self) -> None:
        """Waits for ranks that hold up the others, and kills them."""
        silent = SilentRanks(self.memory, 1 + len(self._processes), _POLLS)
        while not self._closed.wait(self.seconds_to_answer / _POLLS):
            for rank in silent.poll():
                self._end_silent(rank)
            if self.failure() is not None:
                return

    def _end_silent(self, rank: int) -> None:
        process = self._processes[rank]
        stack = self.stack_of(rank)
        logger.error("tensor parallel rank %d does not answer; its stack:\n%s", rank, stack or "unknown")
        self._fail(rank, f"process {process.pid} has not answered for {self.seconds_to_answer:g} s")
        process.kill()

    def stack_of(self, rank: int) -> str:
        """Returns the Python stacks of a rank's threads; empty if it does not tell them, as if stopped."""
        process, file = self._processes[rank], self._stacks[rank]
        process.send_signal(signal.SIGUSR1)  # the rank has registered faulthandler
        size, end = 0, time.monotonic() + _SECONDS_TO_TELL
        while time.monotonic() < end:
            time.sleep(_SECONDS_TO_TELL / 10)
            before, size = size, os.fstat(file).st_size
            if size and size == before:
                break
        return os.pread(file, size, 0).decode(errors="replace")

    def _end_of(self, rank: int) -> str:
        process = self._processes[rank]
        try:
            code = process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            return f"process {process.pid} does not answer"
        if code < 0:
            return f"process {process.pid} was ended by signal {-code}"
        return f"process {process.pid} ended with status {code}"

    def failure(self) -> str | None:
        """Returns the reason why a rank has failed; None if all are well."""
        if self._reasons:
            return self._reasons[0]
        failed = self.memory.failed_rank
        return None if failed is None else f"tensor parallel rank {failed} has failed"

    def on_failure(self, method: OnFailure) -> None:
        """Calls a method, which is kept weakly, with the error once a rank has failed."""
        self._on_failure.append(weakref.WeakMethod(method))
        if self._reasons:
            method(RankFailedError(self._reasons[0]))

    def fail(self) -> None:
        """Ends the exchanges of all ranks, as this one has failed."""
        self.memory.fail(0)

    def close(self) -> None:
        """Ends the processes; those that do not end by themselves are killed."""
        self._closed.set()
        for connection in self._connections.values():
            connection.close()
        for process in self._processes.values():
            try:
                process.wait(_SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._finder is not None:
            self._finder.join()
        for file in (self.memory.file, *self._stacks.values()):
            os.close(file)


@contextmanager
def _affinity(cpus: Sequence[int]) -> Iterator[None]:
    """Lets the calling thread run on these CPUs only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
