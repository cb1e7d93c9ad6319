"""Deferral of Ctrl-C to the end of an engine step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_held() -> Iterator[Callable[[], None]]:
    """Defers Ctrl-C within the block; a second Ctrl-C interrupts at once.

    Yields:
        A function that raises the deferred interrupt, to be called between steps.
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
