"""What all engines of a process do together, and what one must do alone."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


class Turns:
    """Lets any number compute at the same time, or one alone; who comes later does not pass who waits."""

    def __init__(self) -> None:
        self._together = 0
        self._alone = False
        self._lock = threading.Lock()
        self._waiting: deque[tuple[bool, threading.Lock]] = deque()

    def together(self) -> AbstractContextManager[None]:
        """Others may compute during the block, but nobody alone."""
        return self._turn(alone=False)

    def alone(self) -> AbstractContextManager[None]:
        """Nobody else computes during the block."""
        return self._turn(alone=True)

    @contextmanager
    def _turn(self, alone: bool) -> Iterator[None]:
        self._wait(alone)
        try:
            yield
        finally:
            self._leave(alone)

    def _wait(self, alone: bool) -> None:
        with self._lock:
            if not self._waiting and self._is_free(alone):
                self._enter(alone)
                return
            called = threading.Lock()
            called.acquire()
            self._waiting.append((alone, called))
        called.acquire()

    def _leave(self, alone: bool) -> None:
        with self._lock:
            if alone:
                self._alone = False
            else:
                self._together -= 1
            while self._waiting and self._is_free(self._waiting[0][0]):
                next_alone, called = self._waiting.popleft()
                self._enter(next_alone)
                called.release()

    def _is_free(self, alone: bool) -> bool:
        return not self._alone and not (alone and self._together)

    def _enter(self, alone: bool) -> None:
        if alone:
            self._alone = True
        else:
            self._together += 1


TURNS = Turns()
"""Of this process: tracing a model patches what the modules of all others are called by."""
