"""The processes of ranks that this process has started, and the end of a process."""

from __future__ import annotations

import os
import time
from pathlib import Path


def pids() -> list[int]:
    """Returns the processes of the other ranks: the children that run the program of a rank."""
    tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")  # any thread may have started them
    children = [int(pid) for file in tasks for pid in _read(file).split()]
    return [process for process in children if "rank_process" in _read(Path(f"/proc/{process}/cmdline"))]


def ended(process: int, seconds: float = 10) -> bool:
    """True if a process ends within a time."""
    until = time.monotonic() + seconds
    while _state(process) not in ("", "Z"):
        if time.monotonic() >= until:
            return False
        time.sleep(0.1)
    return True


def _state(process: int) -> str:
    return _read(Path(f"/proc/{process}/stat")).rpartition(")")[2].strip()[:1]


def _read(file: Path) -> str:
    """Returns the text of a file of /proc, "" once its thread or process is gone."""
    try:
        return file.read_text()
    except OSError:  # it may end at any time, between the listing and the reading too
        return ""
