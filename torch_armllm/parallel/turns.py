"""Several engines of one process take turns at its cores."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch_armllm.machine import physical_cores


class Turns:
    """Lets those compute at the same time for whom there are cores, and others in the order of their coming.

    Threads of two engines on the same cores displace each other in the middle of every op, and each op waits
    for its last thread: both are slower than one after the other.

    Args:
        cores: that there are.
    """

    def __init__(self, cores: int) -> None:
        self._cores = self._free = cores
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, threading.Lock]] = deque()

    @contextmanager
    def turn(self, threads: int) -> Iterator[None]:
        """Waits until there are cores for so many threads, and has them for the block."""
        cores = min(threads, self._cores)
        self._wait_for(cores)
        try:
            yield
        finally:
            self._give_back(cores)

    def alone(self) -> AbstractContextManager[None]:
        """Nobody else computes during the block."""
        return self.turn(self._cores)

    def _wait_for(self, cores: int) -> None:
        with self._lock:
            if not self._waiting and cores <= self._free:
                self._free -= cores
                return
            called = threading.Lock()
            called.acquire()
            self._waiting.append((cores, called))
        called.acquire()

    def _give_back(self, cores: int) -> None:
        with self._lock:
            self._free += cores
            while self._waiting and self._waiting[0][0] <= self._free:
                wanted, called = self._waiting.popleft()
                self._free -= wanted
                called.release()


TURNS = Turns(len(physical_cores()))
"""Of this process: all its engines share its cores, whoever started them."""
