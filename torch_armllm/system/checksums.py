"""Checksums of the files of a folder, which tell whether it is as it was written."""

from __future__ import annotations

import hashlib
from pathlib import Path

NAME = "SHA256SUMS"
"""The file of checksums, in the form of the command ``sha256sum``."""
_CHUNK = 1 << 20


def write_checksums(folder: Path) -> None:
    """Writes the checksums of all files of a folder into it."""
    (folder / NAME).write_text(_checksums(folder), encoding="utf-8")


def is_intact(folder: Path) -> bool:
    """True if a folder has the files, with the bytes, for which `write_checksums` was called."""
    try:
        return (folder / NAME).read_bytes() == _checksums(folder).encode()
    except OSError:
        return False


def _checksums(folder: Path) -> str:
    files = sorted(path for path in folder.iterdir() if path.name != NAME)
    return "".join(f"{_sum_of(path)}  {path.name}\n" for path in files)


def _sum_of(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
