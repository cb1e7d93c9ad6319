"""Errors of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class RequestAbortedError(RuntimeError):
    """A request was aborted, and has no output."""


class StepFailedError(RuntimeError):
    """A step failed: its requests have ended, all others continue.

    Attributes:
        request_ids: the requests that have ended.
    """

    def __init__(self, request_ids: Iterable[str], cause: BaseException) -> None:
        super().__init__(f"a step of the engine failed: {cause!r}")
        self.request_ids = tuple(request_ids)
        self.__cause__ = cause

    def copy(self) -> StepFailedError:
        """Returns an equal error for another waiter, as every raise adds to the traceback of its error."""
        assert self.__cause__ is not None
        return StepFailedError(self.request_ids, self.__cause__)


class RankFailedError(RuntimeError):
    """A tensor parallel rank has failed: no rank can compute another step, and the engine has ended."""


OnFailure = Callable[[RankFailedError], object]
"""Is called with the error once a rank has failed."""


class ReplicaFailedError(RuntimeError):
    """The replica that computed a request has ended; the other replicas continue."""
