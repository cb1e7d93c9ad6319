"""Where the time of an engine's steps goes, for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

_END = b"\n]"


class Trace:
    """What a step spends its time on; this one takes no notes.

    A step is `begin`, a `mark` behind each of its phases, and `end`.
    """

    def begin(self) -> None:
        """Begins a step."""

    def mark(self, phase: str) -> None:
        """Ends a phase, which began with the step or at the last mark."""

    def end(self, **facts: int) -> None:
        """Ends a step.

        Args:
            facts: numbers that describe it.
        """


NO_TRACE = Trace()


class TraceFile(Trace):
    """Writes steps to a file in Chrome's trace format: a JSON array of events, valid after every step.

    Each step is one write that begins over the array's closing bracket, so that a process that dies leaves a
    file that can be read.

    Args:
        path: of the file, which is overwritten.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        name = {"name": "process_name", "ph": "M", "pid": os.getpid(), "args": {"name": "torch_armllm"}}
        self._size = os.write(self._file, b"[\n" + json.dumps(name).encode() + _END)
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
        events = [step, *(_event(*phase) for phase in self._phases)]
        text = "".join(",\n" + json.dumps(event) for event in events).encode() + _END
        os.pwrite(self._file, text, self._size - len(_END))
        self._size += len(text) - len(_END)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)


def _event(name: str, begin: int, end: int, facts: dict[str, int] | None = None) -> dict[str, Any]:
    """A span in Chrome's words; times are in nanoseconds here, in microseconds there."""
    made = {"name": name, "ph": "X", "ts": begin / 1e3, "dur": (end - begin) / 1e3}
    return {**made, "pid": os.getpid(), "tid": threading.get_native_id(), "args": facts or {}}
