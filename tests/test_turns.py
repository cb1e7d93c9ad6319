"""Engines of one process take turns at its cores."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from torch_armllm.parallel.turns import Turns


class Worker:
    """A thread that takes a turn, and has it until it is told to end."""

    def __init__(self, turns: Turns, threads: int) -> None:
        self.working, self._end = threading.Event(), threading.Event()
        self._turns, self._threads = turns, threads
        waiting = len(turns._waiting)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()
        until(lambda: self.working.is_set() or len(turns._waiting) > waiting)

    def _work(self) -> None:
        with self._turns.turn(self._threads):
            self.working.set()
            self._end.wait(10)

    def end(self) -> None:
        self._end.set()
        self._thread.join(10)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


def test_who_has_cores_does_not_wait() -> None:
    turns = Turns(4)
    workers = [Worker(turns, 2), Worker(turns, 2), Worker(turns, 1)]
    assert [worker.working.is_set() for worker in workers] == [True, True, False]
    for worker in workers:
        worker.end()


def test_others_come_in_their_order() -> None:
    """A small one does not pass a large one that came first: that might wait for ever."""
    turns = Turns(4)
    first, large, small, last = workers = [Worker(turns, threads) for threads in (3, 4, 1, 1)]
    assert [worker.working.is_set() for worker in workers] == [True, False, False, False]
    first.end()
    until(large.working.is_set)
    assert not small.working.is_set() and not last.working.is_set()
    large.end()
    until(lambda: small.working.is_set() and last.working.is_set())
    small.end()
    last.end()


def test_more_threads_than_cores_have_all() -> None:
    turns = Turns(2)
    large, small = Worker(turns, 5), Worker(turns, 1)
    assert large.working.is_set() and not small.working.is_set()
    large.end()
    until(small.working.is_set)
    small.end()


def test_a_turn_ends_with_an_error() -> None:
    turns = Turns(1)
    with pytest.raises(ValueError), turns.alone():
        raise ValueError
    with turns.alone():
        pass


def test_turns_alternate() -> None:
    """Who has just had a turn is behind those who wait."""
    turns, order, begun = Turns(1), list[str](), threading.Barrier(2)

    def work(name: str) -> None:
        begun.wait()
        for _ in range(20):
            with turns.turn(1):
                order.append(name)
                time.sleep(0.002)

    several = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in several:
        thread.start()
    for thread in several:
        thread.join(10)
    changes = sum(one != other for one, other in zip(order, order[1:], strict=False))
    assert changes >= 20
