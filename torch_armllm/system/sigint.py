"""Ctrl-C between two steps, and not in the middle of one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_held() -> Iterator[Callable[[], None]]:
    """Holds Ctrl-C back within the block; a second one gets through at once.

    Yields:
        Lets the one that was held back through: to be called where nothing is half done.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield lambda: None
        return
    caught: list[FrameType | None] = []

    def hold(number: int, frame: FrameType | None) -> None:
        caught.append(frame)
        if len(caught) > 1:
            previous(number, frame)

    def release() -> None:
        if caught:
            previous(signal.SIGINT, caught.pop())

    signal.signal(signal.SIGINT, hold)
    try:
        yield release
    finally:
        signal.signal(signal.SIGINT, previous)
        release()
