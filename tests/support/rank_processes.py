"""The processes of ranks that this process has started, and the end of a process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path


def pids() -> list[int]:
    """Returns the processes of the other ranks: the children that run the program of a rank."""
    return [each for each in children() if any("rank_process" in _read(file) for file in _names(each))]


def _names(process: int) -> list[Path]:
    """Returns the files that name the program of a process: its command, and what a warm one is called."""
    return [Path(f"/proc/{process}/{name}") for name in ("cmdline", "comm")]


def children(parent: int | None = None) -> list[int]:
    """Returns the children of a process, by default of this one.

    Each process says who its parent is. The list of a thread's children in /proc leaves some out while others
    end.
    """
    parent = os.getpid() if parent is None else parent
    return [process for process in _all() if _status(process)[1:2] == [str(parent)]]


def descendants(parent: int | None = None) -> Iterator[int]:
    """Yields the children of a process, by default of this one, and theirs."""
    for child in children(parent):
        yield child
        yield from descendants(child)


def ended(process: int, seconds: float = 60) -> bool:
    """True if a process ends within a time."""
    until = time.monotonic() + seconds
    while _status(process)[:1] not in ([], ["Z"]):
        if time.monotonic() >= until:
            return False
        time.sleep(0.1)
    return True


def _all() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]


def _status(process: int) -> list[str]:
    """Returns the state of a process, its parent and more; nothing once it is gone."""
    return _read(Path(f"/proc/{process}/stat")).rpartition(")")[2].split()


def _read(file: Path) -> str:
    """Returns the text of a file of /proc, "" once its process is gone."""
    try:
        return file.read_text()
    except OSError:  # it may end at any time, between the listing and the reading too
        return ""
