"""The other processes that a model is shared out to, as the leader sees them."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from socket import socketpair
from typing import Any

from torch_armllm.checkpoint.model_request import ModelRequest
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.execution.rank_failures import RankFailures
from torch_armllm.engine.execution.rank_leader import RankLeader
from torch_armllm.llm.child_process import ChildProcess
from torch_armllm.llm.rank_part import FollowerSettings
from torch_armllm.parallel.mailbox import Mailbox
from torch_armllm.parallel.rank_place import RankPlace
from torch_armllm.parallel.row_link import RowLink
from torch_armllm.parallel.shared_memory import GroupMemory
from torch_armllm.parallel.silent_ranks import SilentRanks

_SECONDS_TO_TELL = 1.0
"""Time that a rank has to write its stack."""
_SECONDS_TO_FIND = 2.0
"""Time in which the rank that failed first is found, where others end because of it."""
_POLLS = 30
"""Polls in a row after which a rank is silent."""

logger = logging.getLogger(__name__)


class RankProcesses:
    """Starts a process for each rank but 0, and watches them.

    Args:
        cores: CPUs of each rank, that of this process included.
        leader: place of this process.
        load: what each loads.
        links: descriptors of each rank's sockets from the stage before and to the next one; empty if there is
            one stage.

    Attributes:
        memory: shared by all ranks.
        on_failure: calls a method, which is kept weakly, with the error once a rank has failed.
        seconds_to_answer: time after which a rank that holds up the others in a step is killed.
    """

    seconds_to_answer = 60.0

    def __init__(
        self,
        cores: Sequence[Sequence[int]],
        leader: RankPlace,
        load: tuple[ModelRequest, EngineConfig],
        links: Sequence[Sequence[int]] = (),
    ) -> None:
        self._leader = leader
        grid = leader.tensor_ranks, leader.stages
        self.memory = GroupMemory(*grid)
        self._failures = RankFailures()
        self.on_failure = self._failures.on_failure
        self._closed = threading.Event()
        self._finder: threading.Thread | None = None
        self._stacks = {rank: os.memfd_create(f"stacks of rank {rank}") for rank in range(1, len(cores))}
        self._children: dict[int, ChildProcess] = {}
        self._rows: list[RowLink] = []
        for rank, stacks in self._stacks.items():
            ours, theirs = socketpair()
            files = self.memory.file, stacks, theirs.fileno(), *(links[rank] if links else ())
            with theirs:
                arguments = [rank, *grid, *files]
                child = ChildProcess("torch_armllm.llm.rank_process", cores[rank], arguments, files)
            self._rows.append(RowLink(ours))
            child.connection.send(load)
            self._children[rank] = child

    def send(self, message: Any) -> None:
        """Sends a message to all ranks."""
        for child in self._children.values():
            child.connection.send(message)

    def receive(self) -> list[Any]:
        """Waits for a message of each rank, and returns them.

        Raises:
            ValueError: a rank has failed; the message says why.
        """
        return [self._receive(rank) for rank in self._children]

    def _receive(self, rank: int) -> Any:
        try:
            kind, content = self._children[rank].connection.recv()
        except (EOFError, OSError):
            kind, content = "failed", self._children[rank].reason()
        if kind in ("failed", "lost"):
            self.memory.fail(rank)
            raise ValueError(f"{self._name(rank)} failed: {content}")
        return content

    def leader(self, settings: FollowerSettings) -> RankLeader:
        """Tells the ranks the sizes of their caches, watches them, and returns what sends them steps."""
        self.send(settings)
        self._watch_all()
        mailbox = Mailbox(self.memory.mail, self._leader.size, self._check)
        return RankLeader(mailbox, self, self._rows)

    def _name(self, rank: int) -> str:
        return str(replace(self._leader, rank=rank))

    def _check(self) -> None:
        reason = self.failure()
        if reason is not None:
            raise RuntimeError(reason)

    def _watch_all(self) -> None:
        """Begins to watch the processes: one that ends, or does not answer, ends the exchanges of all."""
        for rank in self._children:
            threading.Thread(target=self._watch, args=[rank], name=f"armllm-rank-{rank}", daemon=True).start()
        self._finder = threading.Thread(target=self._find_silent, name="armllm-silent-ranks", daemon=True)
        self._finder.start()

    def _watch(self, rank: int) -> None:
        try:
            kind, reason = self._children[rank].connection.recv()
        except (EOFError, OSError):
            kind, reason = "failed", self._children[rank].reason()
        if kind == "lost":
            self._failures.wait(_SECONDS_TO_FIND)
        if not self._closed.is_set():
            self._fail(rank, reason)

    def _fail(self, rank: int, reason: str) -> None:
        self.memory.fail(rank)
        self._failures.add(f"{self._name(rank)} has failed: {reason}")

    def _find_silent(self) -> None:
        """Waits for ranks that hold up the others, and kills them."""
        silent = SilentRanks(self.memory, self._leader.tensor_ranks, self._leader.stages, _POLLS)
        while not self._closed.wait(self.seconds_to_answer / _POLLS):
            for rank in silent.poll():
                self._end_silent(rank)
            if self.failure() is not None:
                return

    def _end_silent(self, rank: int) -> None:
        process = self._children[rank].process
        stack = self.stack_of(rank)
        logger.error("%s does not answer; its stack:\n%s", self._name(rank), stack or "unknown")
        self._fail(rank, f"process {process.pid} has not answered for {self.seconds_to_answer:g} s")
        process.kill()

    def stack_of(self, rank: int) -> str:
        """Returns the Python stacks of a rank's threads; empty if it does not tell them, as if stopped."""
        process, file = self._children[rank].process, self._stacks[rank]
        process.send_signal(signal.SIGUSR1)  # the rank has registered faulthandler
        size, end = 0, time.monotonic() + _SECONDS_TO_TELL
        while time.monotonic() < end:
            time.sleep(_SECONDS_TO_TELL / 10)
            before, size = size, os.fstat(file).st_size
            if size and size == before:
                break
        return os.pread(file, size, 0).decode(errors="replace")

    def failure(self) -> str | None:
        """Returns the reason why another rank has failed; None if all are well."""
        failed = self.memory.failed_rank
        if failed is not None and self._finder is not None:
            self._failures.wait(_SECONDS_TO_FIND)
        if self._failures.first is not None:
            return self._failures.first
        return f"{self._name(failed)} has failed" if failed else None

    def fail(self) -> None:
        """Ends the exchanges of all ranks, as this one has failed."""
        self.memory.fail(0)

    def close(self) -> None:
        """Ends the processes; those that do not end by themselves are killed."""
        self._closed.set()
        for child in self._children.values():
            child.connection.close()
        for child in self._children.values():
            child.close()
        for link in self._rows:
            link.close()
        if self._finder is not None:
            self._finder.join()
        for file in (self.memory.file, *self._stacks.values()):
            os.close(file)
