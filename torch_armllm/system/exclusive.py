"""What all engines of a process do together, and what one must do alone."""

from __future__ import annotations

import threading
from collections import deque


class Turns:
    """Lets any number compute at the same time, or one alone; who comes later does not pass who waits."""

    def __init__(self) -> None:
        self._together = 0
        self._alone = False
        self._lock = threading.Lock()
        self._waiting: deque[tuple[bool, threading.Lock]] = deque()

    def together(self) -> Turn:
        """Others may compute during the block, but nobody alone."""
        return Turn(self, alone=False)

    def alone(self) -> Turn:
        """Nobody else computes during the block."""
        return Turn(self, alone=True)

    def wait(self, alone: bool) -> None:
        """Begins a turn, as soon as there is one."""
        with self._lock:
            if not alone and not self._alone and not self._waiting:  # most are so
                self._together += 1
                return
            if not self._waiting and self._is_free(alone):
                self._enter(alone)
                return
            called = threading.Lock()
            called.acquire()
            self._waiting.append((alone, called))
        called.acquire()

    def leave(self, alone: bool) -> None:
        """Ends a turn."""
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


class Turn:
    """A block that has a turn: a class, since generators would take an engine's step 13 µs more."""

    def __init__(self, turns: Turns, alone: bool) -> None:
        self._turns, self._alone = turns, alone

    def __enter__(self) -> None:
        self._turns.wait(self._alone)

    def __exit__(self, *_: object) -> None:
        self._turns.leave(self._alone)


TURNS = Turns()
"""Of this process: tracing a model patches what the modules of all others are called by."""
