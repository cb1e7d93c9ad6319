"""A rank that computes the steps that the leader sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch_armllm.engine.execution.message import ComputeLogits, Message, ReleaseCache, Stop
from torch_armllm.engine.execution.message_codec import decode
from torch_armllm.engine.execution.row_order import RowOrder
from torch_armllm.engine.execution.step_executor import StepExecutor
from torch_armllm.engine.execution.step_message import StepMessage, StepReader


class Inbox(Protocol):
    """Receives the leader's messages."""

    def receive(self) -> int:
        """Waits for the next message and returns its address."""
        ...

    def done(self, rank: int) -> None:
        """Lets the leader reuse the memory of a message."""
        ...


class RowServer(Protocol):
    """Gives and takes bytes of this rank's caches."""

    def do(self, order: RowOrder) -> None:
        """Does what the leader asks for."""
        ...


def follow(rank: int, mailbox: Inbox, executor: StepExecutor, rows: RowServer | None = None) -> None:
    """Computes steps until the leader ends.

    Args:
        rank: number of this process.
        mailbox: from which it reads.
        executor: with this rank's part of the weights and of the KV cache.
        rows: gives and takes bytes of its caches; None: the leader asks for none.
    """
    acts: dict[type[Message], Callable[[Any], object]] = {
        StepMessage: StepReader(executor).compute,
        ComputeLogits: lambda _: executor.course.finish(),
        ReleaseCache: lambda _: executor.caches.release(),
        **executor.features.acts,
    }
    if rows is not None:
        acts[RowOrder] = rows.do
    while True:
        message = decode(mailbox.receive())
        mailbox.done(rank)
        if isinstance(message, Stop):
            return
        acts[type(message)](message)
