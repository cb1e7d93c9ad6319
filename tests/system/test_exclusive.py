"""The shared/exclusive lock: engine steps share it, a capture holds it alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from torch_armllm.system.exclusive import SharedExclusiveLock


class Worker:
    """A thread that acquires the lock and holds it until `end`."""

    def __init__(self, lock: SharedExclusiveLock, exclusive: bool) -> None:
        self.working, self._end = threading.Event(), threading.Event()
        self._lock, self._exclusive = lock, exclusive
        waiting = len(lock._waiting)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()
        until(lambda: self.working.is_set() or len(lock._waiting) > waiting)

    def _work(self) -> None:
        with self._lock.exclusive() if self._exclusive else self._lock.shared():
            self.working.set()
            self._end.wait(20)

    def end(self) -> None:
        self._end.set()
        self._thread.join(20)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


def test_several_threads_share_the_lock() -> None:
    lock = SharedExclusiveLock()
    workers = [Worker(lock, exclusive=False) for _ in range(3)]
    assert all(worker.working.is_set() for worker in workers)
    for worker in workers:
        worker.end()


def test_exclusive_waiter_is_not_overtaken() -> None:
    """It waits for earlier holders, and later threads wait for it; otherwise it might wait forever."""
    lock = SharedExclusiveLock()
    workers = [Worker(lock, exclusive) for exclusive in (False, True, False, False, True)]
    first, exclusive, *others, last = workers
    assert [worker.working.is_set() for worker in workers] == [True, False, False, False, False]
    first.end()
    until(exclusive.working.is_set)
    assert not any(worker.working.is_set() for worker in others)
    exclusive.end()
    until(lambda: all(worker.working.is_set() for worker in others))
    assert not last.working.is_set()
    for worker in others:
        worker.end()
    until(last.working.is_set)
    last.end()


def test_error_releases_the_lock() -> None:
    lock = SharedExclusiveLock()
    for hold in (lock.exclusive, lock.shared):
        with pytest.raises(ValueError), hold():
            raise ValueError
    with lock.exclusive():
        pass
