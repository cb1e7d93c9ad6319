"""The other processes of a sharded model, which this one has started."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from socket import socket, socketpair
from typing import Any

from torch_armllm.checkpoint.model_request import ModelRequest
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.execution.rank_leader import RankLeader
from torch_armllm.llm.ranks.agreement import for_follower
from torch_armllm.llm.ranks.rank_shard import FollowerSettings
from torch_armllm.llm.ranks.watcher import RankWatcher
from torch_armllm.ops.collective import close_communicator
from torch_armllm.parallel.mailbox import Mailbox
from torch_armllm.parallel.placement import place_on, rank_cpus
from torch_armllm.parallel.rank_group import RankGroup
from torch_armllm.parallel.rank_place import RankPlace
from torch_armllm.parallel.row_link import RowLink
from torch_armllm.parallel.shared_memory import GroupMemory
from torch_armllm.parallel.silent_ranks import SilentRanks
from torch_armllm.parallel.stage_link import StageLink, rings
from torch_armllm.system.child_process import ChildProcess

_SECONDS_TO_TELL = 1.0
"""Time that a rank has to write its stack."""
_SECONDS_TO_FIND = 2.0
"""Time in which the rank that failed first is found, where others end because of it."""
_POLLS = 30
"""Polls in a row after which a rank is silent."""

logger = logging.getLogger(__name__)


def start_processes(request: ModelRequest, config: EngineConfig) -> RankProcesses:
    """Starts a process for each shard of a model but the first, and takes this one to the CPUs of rank 0."""
    place = RankPlace(0, config.tensor_ranks, config.pipeline_parallel_size)
    cores = rank_cpus(place.size)
    processes = RankProcesses(cores, place, for_follower(request, config))
    place_on(cores[0])
    logger.info("%s runs on CPUs %s, others on %s", place, cores[0], cores[1:])
    return processes


class RankProcesses:
    """Starts a process for each rank but 0, watches them, and is rank 0's session with them.

    Args:
        cores: CPUs of each rank, that of this process included.
        place: of this process.
        load: what each loads.

    Attributes:
        place: see above.
        memory: shared by all ranks.
        on_failure: calls a method, which is kept weakly, with the error once a rank has failed.
        seconds_to_answer: time after which a rank that holds up the others in a step is killed.
    """

    seconds_to_answer = 60.0

    def __init__(
        self, cores: Sequence[Sequence[int]], place: RankPlace, load: tuple[ModelRequest, EngineConfig]
    ) -> None:
        self.place = place
        self.memory = GroupMemory(place.tensor_ranks, place.stages)
        self._watcher = RankWatcher(place, self.memory.fail)
        self.on_failure = self._watcher.on_failure
        self._finder: threading.Thread | None = None
        self._group: RankGroup | None = None
        self._link: StageLink | None = None
        self._stacks = {rank: os.memfd_create(f"stacks of rank {rank}") for rank in range(1, len(cores))}
        self._children: dict[int, ChildProcess] = {}
        self._rows: list[RowLink] = []
        self._ring: tuple[socket, socket] | None = None
        links: list[tuple[socket, socket]] = []
        if place.stages > 1:
            self._ring, *links = rings(place.tensor_ranks, place.stages)
        for rank, stacks in self._stacks.items():
            ours, theirs = socketpair()
            sockets = links[rank - 1] if links else ()
            files = self.memory.file, stacks, theirs.fileno(), *(each.fileno() for each in sockets)
            with theirs:
                arguments = [rank, place.tensor_ranks, place.stages, *files]
                program = "torch_armllm.llm.ranks.rank_process"
                child = ChildProcess(program, cores[rank], arguments, files)
            self._rows.append(RowLink(ours))
            child.connection.send(load)
            self._children[rank] = child
        for pair in links:  # once their process has ended, a connection is to end too
            for each in pair:
                each.close()

    def gather(self, own: Any) -> list[Any]:
        """Returns what this and each other rank gives.

        Raises:
            ValueError: a rank has failed; the message says why.
        """
        return [own, *(self._receive(rank) for rank in self._children)]

    def _receive(self, rank: int) -> Any:
        try:
            kind, content = self._children[rank].connection.recv()
        except (EOFError, OSError):
            kind, content = "failed", self._children[rank].reason()
        if kind in ("failed", "lost"):
            self.memory.fail(rank)
            raise ValueError(f"{self._watcher.name(rank)} failed: {content}")
        return content

    def share(self, own: Any) -> Any:
        """Tells the other ranks."""
        self._send(own)
        return own

    def open_group(self, whole_experts: bool) -> RankGroup | None:
        """Lets all ranks go on, and returns those of this process's stage; None if it is the only one."""
        self._send("build")
        self._group = self.memory.group(self.place, whole_experts)
        return self._group

    def open_link(self, group: RankGroup | None) -> StageLink | None:
        """Returns the connections to the stages before and after; None if there is one stage."""
        self._link = StageLink(*self._ring, group=group) if self._ring else None
        return self._link

    def lead(self, settings: FollowerSettings) -> RankLeader:
        """Tells the ranks the sizes of their caches, watches them, and returns what sends them steps."""
        self._send(settings)
        self._watcher.begin(self._children, self._end_of)
        self._finder = threading.Thread(target=self._find_silent, name="armllm-silent-ranks", daemon=True)
        self._finder.start()
        mailbox = Mailbox(self.memory.mail, self.place.size, self._check)
        return RankLeader(mailbox, self, self._rows)

    def _send(self, message: Any) -> None:
        for child in self._children.values():
            child.connection.send(message)

    def _check(self) -> None:
        reason = self.failure()
        if reason is not None:
            raise RuntimeError(reason)

    def _end_of(self, rank: int) -> str:
        """Waits for the end of a process: one that ends, or does not answer, ends the exchanges of all."""
        try:
            kind, reason = self._children[rank].connection.recv()
        except (EOFError, OSError):
            kind, reason = "failed", self._children[rank].reason()
        if kind == "lost":
            self._watcher.wait(_SECONDS_TO_FIND)
        return f"{self._watcher.name(rank)} has failed: {reason}"

    def _find_silent(self) -> None:
        """Waits for ranks that hold up the others, and kills them."""
        silent = SilentRanks(self.memory, self.place.tensor_ranks, self.place.stages, _POLLS)
        while not self._watcher.closed.wait(self.seconds_to_answer / _POLLS):
            for rank in silent.poll():
                self._end_silent(rank)
            if self.failure() is not None:
                return

    def _end_silent(self, rank: int) -> None:
        process, name = self._children[rank].process, self._watcher.name(rank)
        stack = self.stack_of(rank)
        logger.error("%s does not answer; its stack:\n%s", name, stack or "unknown")
        reason = f"process {process.pid} has not answered for {self.seconds_to_answer:g} s"
        self._watcher.fail(rank, f"{name} has failed: {reason}")
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
            self._watcher.wait(_SECONDS_TO_FIND)
        if self._watcher.first is not None:
            return self._watcher.first
        return f"{self._watcher.name(failed)} has failed" if failed else None

    awaited_failure = failure

    def fail(self) -> None:
        """Ends the exchanges of all ranks, as this one has failed."""
        self.memory.fail(0)

    def close(self) -> None:
        """Ends the processes; those that do not end by themselves are killed."""
        self._watcher.closed.set()
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
        if self._link is not None:
            self._link.close()
        elif self._ring is not None:
            for each in self._ring:
                each.close()
        if self._group is not None:
            close_communicator(self._group.communicator)  # its memory goes with the last plan that reads it
