"""Files that others may put where a process looks for its own."""

from __future__ import annotations

import os
from pathlib import Path


def link(path: Path, victim: Path) -> None:
    """A link to a file."""
    path.symlink_to(victim)


def dangling(path: Path, victim: Path) -> None:
    """A link to a file that would be made."""
    path.symlink_to(victim.with_name("absent"))


def second_name(path: Path, victim: Path) -> None:
    """A hard link."""
    path.hardlink_to(victim)


def pipe(path: Path, victim: Path) -> None:
    """A pipe, which nobody writes to."""
    os.mkfifo(path)


def planted_folder(path: Path, victim: Path) -> None:
    """A folder."""
    path.mkdir()


def writable(path: Path, victim: Path) -> None:
    """A file that all may write."""
    path.write_text("mine")
    path.chmod(0o666)


PLANTED = [link, dangling, second_name, pipe, planted_folder, writable]
