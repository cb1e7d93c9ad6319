"""A link of two network interfaces that holds every frame for a while, where the kernel has no ``netem``."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from types import TracebackType

_SET_INTERFACE = 0x400454CA  # TUNSETIFF
_WHOLE_FRAMES = 0x0002 | 0x1000  # IFF_TAP, without a header before each frame
_MOST_BYTES = 1 << 16
_PRIORITY = 50


class DelayedLink:
    """Two interfaces, of which each receives what the other one sends, after a delay.

    They exist from the beginning, and may be moved to other network namespaces.  A thread holds the frames.
    It has a priority of real time, so that frames are late by some microseconds only where other processes
    have all cores.  Needs root and ``/dev/net/tun``.

    Args:
        names: of the interfaces.
        seconds: that a frame is held.
    """

    def __init__(self, names: tuple[str, str], seconds: float) -> None:
        self._seconds = seconds
        self._ends = [_interface(name) for name in names]
        self._wake, self._close = os.pipe()
        self._thread = threading.Thread(target=self._forward, daemon=True)

    def __enter__(self) -> DelayedLink:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._close)
        self._thread.join()
        for end in (*self._ends, self._wake):
            os.close(end)

    def _forward(self) -> None:
        with suppress(PermissionError):  # in some containers; frames are then later
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))  # of this thread
        held: deque[tuple[float, int, bytes]] = deque()
        while True:
            wait = None if not held else max(0.0, held[0][0] - time.perf_counter())
            ready, _, _ = select.select([*self._ends, self._wake], [], [], wait)
            if self._wake in ready:
                return
            for end in ready:
                self._read(end, held)
            while held and held[0][0] <= time.perf_counter():
                _, other, frame = held.popleft()
                try:
                    os.write(other, frame)
                except OSError:  # the interface is down: frames are lost, as on a network
                    continue

    def _read(self, end: int, held: deque[tuple[float, int, bytes]]) -> None:
        other = self._ends[1 - self._ends.index(end)]
        while True:
            try:
                frame = os.read(end, _MOST_BYTES)
            except OSError:  # there is no further one
                return
            held.append((time.perf_counter() + self._seconds, other, frame))


def _interface(name: str) -> int:
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _SET_INTERFACE, struct.pack("16sH22x", name.encode(), _WHOLE_FRAMES))
    return end
