r"""The program of a process that computes a shard of a model; the leader, which is rank 0, starts it.

    python -m torch_armllm.llm.ranks.rank_process RANK TENSOR_RANKS STAGES \
        MEMORY STACKS ROWS [PREVIOUS NEXT] CONNECTION

All but the first three are descriptors: of the group's memory, of a file to which the process writes its
stacks when it gets SIGUSR1, of a socket for bytes of caches, of its sockets from the stage before and to the
next one, and of a socket to the leader.  The process ends when the last one closes.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from socket import socket
from typing import Any

from torch_armllm.llm.ranks.rank_shard import FollowerSettings
from torch_armllm.llm.ranks.session import load_and_follow
from torch_armllm.parallel.mailbox import Mailbox
from torch_armllm.parallel.rank_group import RankGroup
from torch_armllm.parallel.rank_place import RankPlace
from torch_armllm.parallel.row_link import RowLink
from torch_armllm.parallel.shared_memory import GroupMemory
from torch_armllm.parallel.stage_link import LostStageError, StageLink


def main() -> None:
    """Runs the rank until the leader ends."""
    rank, tensor_ranks, stages, file, stacks, rows, *links, leader = map(int, sys.argv[1:])
    place = RankPlace(rank, tensor_ranks, stages)
    for number in (signal.SIGINT, signal.SIGTERM):  # service managers send both to all processes of a server
        signal.signal(number, signal.SIG_IGN)  # the leader decides when to end
    faulthandler.register(signal.SIGUSR1, stacks)
    connection = Connection(leader)
    memory = GroupMemory(tensor_ranks, stages, file)
    try:
        request, config = connection.recv()
        load_and_follow(_Session(place, memory, connection, rows, links), request, config)
    except (EOFError, BrokenPipeError, ConnectionError):  # the leader has gone
        os._exit(1)
    except Exception as error:
        lost = isinstance(error, LostStageError) or memory.failed_rank is not None
        memory.fail(rank)
        if not lost:  # where another process has failed, that one has something to tell
            traceback.print_exc()
        connection.send(("lost" if lost else "failed", f"{type(error).__name__}: {error}"))
        os._exit(1)
    os._exit(0)


class _Session:
    """See `torch_armllm.llm.ranks.session.FollowingSession`; `RankProcesses` is at the other end."""

    def __init__(
        self, place: RankPlace, memory: GroupMemory, connection: Connection, rows: int, links: list[int]
    ) -> None:
        self.place = place
        self._memory, self._connection = memory, connection
        self._rows, self._links = rows, links

    def gather(self, own: Any) -> list[Any]:
        """Tells the leader, which compares."""
        self._connection.send(("fact", own))
        return []

    def share(self, own: Any) -> Any:  # noqa: ARG002 - what this rank would give
        """Returns what the leader tells."""
        return self._connection.recv()

    def open_group(self, whole_experts: bool) -> RankGroup | None:
        """Returns the ranks of this process's stage, once the leader has opened its own."""
        self._connection.recv()
        return self._memory.group(self.place, whole_experts)

    def open_link(self, group: RankGroup | None) -> StageLink | None:
        """Returns the connections to the stages before and after; None if there is one stage."""
        if not self._links:
            return None
        before, after = (socket(fileno=each) for each in self._links)
        return StageLink(before, after, group=group)

    def follow(self) -> tuple[FollowerSettings, Mailbox, RowLink]:
        """Waits for the leader's settings; from then on this process ends with the leader."""
        settings = self._connection.recv()
        threading.Thread(target=self._end_with_leader, name="armllm-leader", daemon=True).start()
        mailbox = Mailbox(self._memory.mail, self.place.size, self._check)
        return settings, mailbox, RowLink(socket(fileno=self._rows))

    def _end_with_leader(self) -> None:
        try:
            self._connection.recv()
        except (EOFError, OSError):
            os._exit(1)

    def _check(self) -> None:
        failed = self._memory.failed_rank
        if failed is not None:
            raise EOFError(f"rank {failed} has failed")


if __name__ == "__main__":
    main()
