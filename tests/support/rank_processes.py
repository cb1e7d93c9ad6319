"""The processes of tensor parallel ranks that this process has started."""

from __future__ import annotations

import os
import time
from pathlib import Path


def pids() -> list[int]:
    """Returns the processes of the other ranks: the children that run the program of a rank."""
    tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")  # any thread may have started them
    children = [int(pid) for file in tasks for pid in file.read_text().split()]
    return [p for p in children if b"rank_process" in Path(f"/proc/{p}/cmdline").read_bytes()]


def ended(process: int, seconds: float = 10) -> bool:
    """True if a process ends within a time."""
    until = time.monotonic() + seconds
    while Path(f"/proc/{process}").exists() and "Z" not in Path(f"/proc/{process}/stat").read_text():
        if time.monotonic() >= until:
            return False
        time.sleep(0.1)
    return True
