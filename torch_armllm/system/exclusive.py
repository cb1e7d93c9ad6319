"""A fair shared/exclusive lock, and the lock of this process."""

from __future__ import annotations

import threading
from collections import deque


class SharedExclusiveLock:
    """Any number of threads hold the lock shared, or one holds it exclusively; waiters enter in order."""

    def __init__(self) -> None:
        self._sharing = 0
        self._exclusive = False
        self._lock = threading.Lock()
        self._waiting: deque[tuple[bool, threading.Lock]] = deque()

    def shared(self) -> LockBlock:
        """Holds the lock during a block, together with other shared holders."""
        return LockBlock(self, exclusive=False)

    def exclusive(self) -> LockBlock:
        """Holds the lock alone during a block."""
        return LockBlock(self, exclusive=True)

    def acquire(self, exclusive: bool) -> None:
        """Waits for the lock, after the threads that wait already."""
        with self._lock:
            if not exclusive and not self._exclusive and not self._waiting:  # the common case
                self._sharing += 1
                return
            if not self._waiting and self._is_free(exclusive):
                self._enter(exclusive)
                return
            called = threading.Lock()
            called.acquire()
            self._waiting.append((exclusive, called))
        called.acquire()

    def release(self, exclusive: bool) -> None:
        """Releases the lock, and lets the next waiters enter."""
        with self._lock:
            if exclusive:
                self._exclusive = False
            else:
                self._sharing -= 1
            while self._waiting and self._is_free(self._waiting[0][0]):
                next_exclusive, called = self._waiting.popleft()
                self._enter(next_exclusive)
                called.release()

    def _is_free(self, exclusive: bool) -> bool:
        return not self._exclusive and not (exclusive and self._sharing)

    def _enter(self, exclusive: bool) -> None:
        if exclusive:
            self._exclusive = True
        else:
            self._sharing += 1


class LockBlock:
    """A block that holds the lock; a class, since a generator would cost an engine step 13 µs more."""

    def __init__(self, lock: SharedExclusiveLock, exclusive: bool) -> None:
        self._lock, self._exclusive = lock, exclusive

    def __enter__(self) -> None:
        self._lock.acquire(self._exclusive)

    def __exit__(self, *_: object) -> None:
        self._lock.release(self._exclusive)


PROCESS_LOCK = SharedExclusiveLock()
"""Held shared by each engine step, and exclusively by tracing, which patches how all modules are called."""
