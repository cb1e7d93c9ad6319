"""Failures of other ranks, and those who want to hear of them."""

from __future__ import annotations

import threading
import weakref

from torch_armllm.engine.errors import OnFailure, RankFailedError


class RankFailures:
    """Reasons why ranks have failed; the first one is what the others follow from."""

    def __init__(self) -> None:
        self._reasons: list[str] = []
        self._found = threading.Event()
        self._methods: list[weakref.WeakMethod[OnFailure]] = []

    @property
    def first(self) -> str | None:
        """The first reason; None if all ranks are well."""
        return self._reasons[0] if self._reasons else None

    def wait(self, seconds: float) -> str | None:
        """Waits for the first reason, for some time, and returns it."""
        self._found.wait(seconds)
        return self.first

    def add(self, reason: str) -> None:
        """Adds a reason, and tells it."""
        self._reasons.append(reason)
        self._found.set()
        for kept in self._methods:
            if (method := kept()) is not None:
                method(RankFailedError(self._reasons[0]))

    def on_failure(self, method: OnFailure) -> None:
        """Calls a method, which is kept weakly, with the error once a rank has failed."""
        self._methods.append(weakref.WeakMethod(method))
        if self._reasons:
            method(RankFailedError(self._reasons[0]))
