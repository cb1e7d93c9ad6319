"""A rank that computes the steps that the leader sends."""

from __future__ import annotations

from typing import Protocol

from torch_armllm.engine.execution.factor_message import FactorPiece, FactorWriter
from torch_armllm.engine.execution.row_order import RowOrder
from torch_armllm.engine.execution.step_executor import StepExecutor
from torch_armllm.engine.execution.step_message import ReceivedStep, Signal, StepReader


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
    reader = StepReader(executor.cache, executor.states, executor.pictures)
    writer = None if executor.slots is None else FactorWriter(executor.slots)
    while True:
        message = reader.read(mailbox.receive())
        mailbox.done(rank)
        if message is Signal.STOP:
            return
        if message is Signal.LOGITS:
            executor.compute_logits()
        elif message is Signal.RELEASE:
            executor.release_cache()
        elif isinstance(message, FactorPiece):
            assert writer is not None, "an adapter, where there are no slots"
            writer.add(message)
        elif isinstance(message, RowOrder):
            assert rows is not None, "the leader asks for bytes of caches"
            rows.do(message)
        elif isinstance(message, ReceivedStep):
            executor.copy(*message.copies)
            with executor.holding(message.adapters):
                executor.run(message.inputs, message.rows, message.best)
            reader.end_step()
