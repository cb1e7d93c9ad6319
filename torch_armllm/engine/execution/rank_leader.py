"""The process that schedules: it sends each step to the other ranks and stages."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import Tensor

from torch_armllm.engine.errors import OnFailure, RankFailedError
from torch_armllm.engine.execution.message import Message, Stop
from torch_armllm.engine.execution.message_codec import encode
from torch_armllm.parallel.row_link import RowLink


class Outbox(Protocol):
    """Sends messages to the other ranks."""

    def post(self, numbers: array[int], tensors: Iterable[Tensor] = ()) -> None:
        """Sends int64 numbers and, after them, the contents of contiguous tensors."""
        ...


class RankWatch(Protocol):
    """Knows whether the other ranks are well."""

    def failure(self) -> str | None:
        """Returns the reason why a rank has failed; None if all are well."""
        ...

    def fail(self) -> None:
        """Ends the other ranks."""
        ...

    @property
    def on_failure(self) -> Callable[[OnFailure], None]:
        """Keeps a method weakly, and calls it with the error once a rank has failed."""
        ...


class RankLeader:
    """Sends messages to the other ranks.

    Args:
        mailbox: from which they read.
        watch: says which rank has failed; None: nobody does, and a broken connection ends the step.
        links: to the other ranks, for bytes of their caches.

    Attributes:
        links: see above.
        rows: held by the thread that gives an order about bytes until the ranks have followed it.
    """

    def __init__(
        self, mailbox: Outbox, watch: RankWatch | None = None, links: Sequence[RowLink] = ()
    ) -> None:
        self._mailbox = mailbox
        self._posting = threading.Lock()
        self._watch = watch
        self.links = links
        self.rows = threading.Lock()
        self._has_failed = False

    def on_failure(self, method: OnFailure) -> None:
        """Keeps a method weakly, and calls it with the error once a rank has failed."""
        if self._watch is not None:
            self._watch.on_failure(method)

    def _failure(self) -> str | None:
        return None if self._watch is None else self._watch.failure()

    def send(self, message: Message) -> None:
        """Sends a message; any thread may send orders about bytes of caches, between two steps.

        Raises:
            RankFailedError: a rank has failed.
        """
        reason = self._failure()
        if reason is not None:
            raise RankFailedError(reason)
        self._post(message)

    def _post(self, message: Message) -> None:
        with self._posting:
            self._mailbox.post(encode(message), message.tensors)

    def fail(self, error: Exception) -> RankFailedError:
        """Ends all ranks, because a step has failed here or there; returns the error of the engine."""
        if self._watch is not None:
            self._watch.fail()
        self._has_failed = True
        if isinstance(error, RankFailedError):
            return error
        failed = RankFailedError(self._failure() or f"a step failed on rank 0: {error}")
        failed.__cause__ = error
        return failed

    def stop(self) -> None:
        """Ends the other ranks."""
        if self._failure() is None and not self._has_failed:
            self._post(Stop())
