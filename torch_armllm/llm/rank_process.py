r"""The program of a process that computes a part of a model; the leader, which is rank 0, starts it.

    python -m torch_armllm.llm.rank_process RANK TENSOR_RANKS STAGES \
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

from torch_armllm.engine.disk.rank_rows import RankRowServer
from torch_armllm.engine.execution.rank_follower import follow
from torch_armllm.engine.execution.stage_course import Stage
from torch_armllm.engine.execution.thread_team import ThreadTeam, choose_threads
from torch_armllm.llm.loader import adapter_slots_of, load_patched
from torch_armllm.llm.rank_part import FollowerSettings, rank_part
from torch_armllm.llm.rank_start import described
from torch_armllm.parallel.mailbox import Mailbox
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
        _run(place, memory, connection, rows, links)
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


def _run(place: RankPlace, memory: GroupMemory, connection: Connection, rows: int, links: list[int]) -> None:
    request, config = connection.recv()
    team = ThreadTeam(choose_threads(config.threads, config.pin_threads))
    team.settle()
    model = load_patched(request, config.kv_cache_dtype, adapter_slots_of(config))
    connection.send(("loaded", described()))
    connection.recv()
    group = memory.group(place, config.enable_expert_parallel)
    part = rank_part(model, config.kv_cache_dtype, place, group)
    del model
    connection.send(("built", part.facts))
    following: FollowerSettings = connection.recv()
    stage = None
    if links:
        before, after = (socket(fileno=each) for each in links)
        stage = Stage(place, StageLink(before, after, group=group))
    executor = part.executor(following, stage)
    threading.Thread(target=_end_with, args=[connection], name="armllm-leader", daemon=True).start()
    mailbox = Mailbox(memory.mail, place.size, lambda: _check(memory))
    with team.at_work():
        follow(place.rank, mailbox, executor, RankRowServer(executor, RowLink(socket(fileno=rows))))


def _end_with(connection: Connection) -> None:
    """Ends this process once the leader has gone."""
    try:
        connection.recv()
    except (EOFError, OSError):
        os._exit(1)


def _check(memory: GroupMemory) -> None:
    failed = memory.failed_rank
    if failed is not None:
        raise EOFError(f"rank {failed} has failed")


if __name__ == "__main__":
    main()
