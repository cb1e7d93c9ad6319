"""Engines compute together, and a capture alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from torch_armllm.system.exclusive import Turns


class Worker:
    """A thread that takes a turn, and has it until it is told to end."""

    def __init__(self, turns: Turns, alone: bool) -> None:
        self.working, self._end = threading.Event(), threading.Event()
        self._turns, self._alone = turns, alone
        waiting = len(turns._waiting)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()
        until(lambda: self.working.is_set() or len(turns._waiting) > waiting)

    def _work(self) -> None:
        with self._turns.alone() if self._alone else self._turns.together():
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


def test_several_together() -> None:
    turns = Turns()
    workers = [Worker(turns, alone=False) for _ in range(3)]
    assert all(worker.working.is_set() for worker in workers)
    for worker in workers:
        worker.end()


def test_one_alone_is_not_passed() -> None:
    """It waits for those before it, and those behind it wait for it: or it might never have its turn."""
    turns = Turns()
    workers = [Worker(turns, alone) for alone in (False, True, False, False, True)]
    first, alone, *others, last = workers
    assert [worker.working.is_set() for worker in workers] == [True, False, False, False, False]
    first.end()
    until(alone.working.is_set)
    assert not any(worker.working.is_set() for worker in others)
    alone.end()
    until(lambda: all(worker.working.is_set() for worker in others))
    assert not last.working.is_set()
    for worker in others:
        worker.end()
    until(last.working.is_set)
    last.end()


def test_a_turn_ends_with_an_error() -> None:
    turns = Turns()
    for turn in (turns.alone, turns.together):
        with pytest.raises(ValueError), turn():
            raise ValueError
    with turns.alone():
        pass
