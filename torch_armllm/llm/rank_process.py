"""The program of a tensor parallel rank, or of a stage of a pipeline, other than 0; the leader starts it.

    python -m torch_armllm.llm.rank_process RANK RANKS MEMORY STACKS [PREVIOUS NEXT] CONNECTION

All but the first two are descriptors: of the group's memory, of a file to which the process writes its stacks
when it gets SIGUSR1, of a stage's sockets from the stage before and to the next one, and of a socket to the
leader.  The process ends when the last one closes.
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

from torch_armllm.engine.execution.rank_follower import follow
from torch_armllm.engine.execution.stage_executor import StageExecutor
from torch_armllm.engine.execution.step_executor import StepExecutor
from torch_armllm.engine.execution.thread_team import ThreadTeam, choose_threads
from torch_armllm.kv_cache.dtypes import STATE_DTYPES
from torch_armllm.kv_cache.shapes import with_state_dtype
from torch_armllm.llm.divided_loader import divide
from torch_armllm.llm.loader import load_patched
from torch_armllm.llm.rank_start import described
from torch_armllm.llm.staged_loader import STAGE_SECONDS, stage_of
from torch_armllm.ops.collective import open_communicator
from torch_armllm.parallel.mailbox import Mailbox
from torch_armllm.parallel.shared_memory import BUFFER_BYTES, GroupMemory
from torch_armllm.parallel.stage_link import StageLink
from torch_armllm.plan.plan_model import PlanModel


def main() -> None:
    """Runs the rank until the leader ends."""
    rank, ranks, file, stacks, *links, leader = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leader decides when to end
    faulthandler.register(signal.SIGUSR1, stacks)
    connection = Connection(leader)
    memory = GroupMemory(ranks, file)
    try:
        _run(rank, ranks, memory, connection, links)
    except (EOFError, BrokenPipeError, ConnectionError):  # the leader has gone
        os._exit(1)
    except Exception as error:
        memory.fail(rank)
        traceback.print_exc()
        connection.send(("failed", f"{type(error).__name__}: {error}"))
        os._exit(1)
    os._exit(0)


def _run(rank: int, ranks: int, memory: GroupMemory, connection: Connection, links: list[int]) -> None:
    settings = connection.recv()
    team = ThreadTeam(choose_threads(settings.pop("threads"), settings.pop("pin_threads")))
    team.settle()
    whole_experts = settings.pop("whole_experts", False)
    model = load_patched(**settings, progress=False)
    connection.send(("loaded", described()))
    connection.recv()
    cache_dtype = settings["kv_cache_dtype"]
    if links:
        part, result = _stage(model, cache_dtype, rank, ranks)
    else:
        part, result = _columns(model, cache_dtype, rank, ranks, memory, whole_experts)
    del model
    connection.send(("built", result))
    sizes: dict[str, Any] = connection.recv()
    shape = with_state_dtype(part.shape, STATE_DTYPES[sizes.pop("state_dtype")])
    if links:
        previous, following = (socket(fileno=each) for each in links)
        link = StageLink(previous, following, STAGE_SECONDS)
        is_last = rank == ranks - 1
        executor: StepExecutor = StageExecutor(part, shape=shape, link=link, is_last=is_last, **sizes)
    else:
        executor = StepExecutor(part, shape=shape, **sizes)
    threading.Thread(target=_end_with, args=[connection], name="armllm-leader", daemon=True).start()
    mailbox = Mailbox(memory.mail, ranks, lambda: _check(memory))
    with team.at_work():
        follow(rank, mailbox, executor)


def _columns(
    model: Any, cache_dtype: str, rank: int, ranks: int, memory: GroupMemory, whole_experts: bool
) -> tuple[PlanModel, Any]:
    """Returns this rank's columns, heads and experts of a model, and what the leader compares."""
    communicator = open_communicator(memory.exchanges, rank, ranks, BUFFER_BYTES)
    divided = divide(model, cache_dtype, communicator, rank, ranks, whole_experts)
    return divided.model, divided.fingerprint


def _stage(model: Any, cache_dtype: str, rank: int, ranks: int) -> tuple[PlanModel, Any]:
    """Returns this rank's layers of a model, and what the leader compares."""
    staged = stage_of(model, cache_dtype, rank, ranks)
    return staged.model, staged.facts


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
