"""Watching of other ranks: the first that ends, and those who want to hear of it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace

from torch_armllm.engine.errors import OnFailure, RankFailedError
from torch_armllm.parallel.rank_place import RankPlace


class RankWatcher:
    """Waits for the ends of other ranks, a thread for each; the others follow from the first.

    Args:
        leader: place of this process.
        stop: called with a rank that has failed, to end what the others wait for.
    """

    def __init__(self, leader: RankPlace, stop: Callable[[int], object]) -> None:
        self._leader, self._stop = leader, stop
        self._failures: list[str] = []
        self._found = threading.Event()
        self._methods: list[weakref.WeakMethod[OnFailure]] = []
        self.closed = threading.Event()
        """Set once the ranks are to end: whatever happens then is no failure."""

    def begin(self, ranks: Iterable[int], end_of: Callable[[int], str | None]) -> None:
        """Begins to watch.

        Args:
            ranks: to watch.
            end_of: waits for the end of a rank, and returns its failure, or None if it is none.
        """
        for rank in ranks:
            work, name = (rank, end_of), f"armllm-rank-{rank}"
            threading.Thread(target=self._watch, args=work, name=name, daemon=True).start()

    def _watch(self, rank: int, end_of: Callable[[int], str | None]) -> None:
        failure = end_of(rank)
        if failure is not None and not self.closed.is_set():
            self.fail(rank, failure)

    def name(self, rank: int) -> str:
        """Returns the name of a rank, for errors."""
        return str(replace(self._leader, rank=rank))

    def fail(self, rank: int, failure: str) -> None:
        """Notes the failure of a rank, and tells it."""
        self._failures.append(failure)
        self._found.set()
        self._stop(rank)
        for kept in self._methods:
            if (method := kept()) is not None:
                method(RankFailedError(self._failures[0]))

    @property
    def first(self) -> str | None:
        """The first failure; None if all ranks are well."""
        return self._failures[0] if self._failures else None

    def wait(self, seconds: float) -> str | None:
        """Waits for the first failure, for some time, and returns it."""
        self._found.wait(seconds)
        return self.first

    def on_failure(self, method: OnFailure) -> None:
        """Calls a method, which is kept weakly, with the error once a rank has failed."""
        self._methods.append(weakref.WeakMethod(method))
        if self._failures:
            method(RankFailedError(self._failures[0]))
