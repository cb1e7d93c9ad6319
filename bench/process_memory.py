"""Memory of this process, as Linux counts it."""

from __future__ import annotations

import threading
import time
from pathlib import Path


def memory(field: str) -> int:
    """Returns a field of /proc/self/status, such as VmRSS or RssAnon, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


class Peak(threading.Thread):
    """Thread that samples the peak of a field a hundred times a second, while a block runs.

    Attributes:
        before: bytes at the begin.
        bytes: at the peak.
    """

    def __init__(self, field: str) -> None:
        super().__init__(daemon=True)
        self._field, self._done = field, False
        self.before = self.bytes = memory(field)

    def __enter__(self) -> Peak:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done = True
        self.join()

    def run(self) -> None:
        """Samples."""
        while not self._done:
            self.bytes = max(self.bytes, memory(self._field))
            time.sleep(0.01)
