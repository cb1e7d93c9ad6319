"""What becomes of requests when a step cannot be computed."""

from __future__ import annotations

from collections.abc import Iterable


class StepFailedError(RuntimeError):
    """A step could not be computed: the requests that took part in it have ended; all others go on.

    Attributes:
        request_ids: of those that have ended.
    """

    def __init__(self, request_ids: Iterable[str], cause: BaseException) -> None:
        super().__init__(f"a step of the engine failed: {cause!r}")
        self.request_ids = tuple(request_ids)
        self.__cause__ = cause

    def again(self) -> StepFailedError:
        """The same error for somebody else: each who raises it adds to its traceback."""
        assert self.__cause__ is not None
        return StepFailedError(self.request_ids, self.__cause__)
