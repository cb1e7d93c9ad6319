"""Timing of engine steps, for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_END = b"\n]"


class Trace:
    """Records the phases of steps; this base class records nothing.

    A step calls `begin`, `mark` after each phase, and `end`.
    """

    def begin(self) -> None:
        """Starts a step."""

    def mark(self, phase: str) -> None:
        """Ends a phase that started at `begin` or at the last mark."""

    def end(self, **facts: int) -> None:
        """Ends a step.

        Args:
            facts: numbers that describe it.
        """


NO_TRACE = Trace()


class TraceFile:
    """A file in Chrome's trace format: a JSON array of events, valid after every step.

    Each step is one write that overwrites the closing bracket: the file stays readable if the process dies.

    Args:
        path: the file to write; an existing one is overwritten.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._lock = threading.Lock()
        name = {"name": "process_name", "ph": "M", "pid": os.getpid(), "args": {"name": "torch_armllm"}}
        self._size = os.write(self._file, b"[\n" + json.dumps(name).encode() + _END)

    def track(self, name: str) -> Track:
        """Returns a track for the steps of one engine.

        Args:
            name: label of the track.
        """
        return Track(self, name)

    def write(self, events: Iterable[dict[str, Any]]) -> None:
        """Adds events."""
        text = "".join(",\n" + json.dumps(event) for event in events).encode() + _END
        with self._lock:
            os.pwrite(self._file, text, self._size - len(_END))
            self._size += len(text) - len(_END)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)


class Track(Trace):
    """The steps of one engine in a file; see `TraceFile.track`."""

    def __init__(self, file: TraceFile, name: str) -> None:
        self._file = file
        self._name = name
        self._thread = 0
        self._phases: list[tuple[str, int, int]] = []
        self._steps = 0
        self.begin()

    def begin(self) -> None:
        """See `Trace.begin`."""
        self._phases.clear()
        self._began = self._last = time.perf_counter_ns()

    def mark(self, phase: str) -> None:
        """See `Trace.mark`."""
        now = time.perf_counter_ns()
        self._phases.append((phase, self._last, now))
        self._last = now

    def end(self, **facts: int) -> None:
        """See `Trace.end`."""
        self._steps += 1
        step = _event("step", self._began, self._last, {"number": self._steps, **facts})
        self._file.write([*self._naming(), step, *(_event(*phase) for phase in self._phases)])

    def _naming(self) -> list[dict[str, Any]]:
        """Names the calling thread if it changed since the last step."""
        if self._thread == (thread := threading.get_native_id()):
            return []
        self._thread = thread
        name = {"name": "thread_name", "ph": "M", "pid": os.getpid(), "tid": thread}
        return [{**name, "args": {"name": self._name}}]


def trace_to(target: str | Path | Trace | None) -> Trace:
    """Returns a trace: into a new file for a path, the given trace itself, or `NO_TRACE` for None.

    Raises:
        OSError: the file cannot be written.
    """
    if isinstance(target, Trace):
        return target
    return TraceFile(target).track("steps") if target else NO_TRACE


def _event(name: str, begin: int, end: int, facts: dict[str, int] | None = None) -> dict[str, Any]:
    """Returns a complete event of Chrome's format, with times in microseconds; arguments are nanoseconds."""
    event = {"name": name, "ph": "X", "ts": begin / 1e3, "dur": (end - begin) / 1e3}
    return {**event, "pid": os.getpid(), "tid": threading.get_native_id(), "args": facts or {}}
