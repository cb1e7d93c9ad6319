"""The folder of a prefix cache: names of files, their total size, and which of them give way."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from torch_armllm.kv_cache.disk.record import SUFFIX

_COUNTER = "bytes"
"""File with the size of all files of blocks; its lock is held by whoever writes or removes some."""
_KEPT = 0.95
"""Share of the limit that is left when files were removed, so that not every write removes some."""
_STEP = 1000
"""Nanoseconds between the times of consecutive blocks: ends of prefixes are removed before beginnings."""


class _File(NamedTuple):
    used: int  # nanoseconds
    size: int
    path: str


class CacheFolder:
    """Files of blocks, of one model or several, up to a total size.

    Several processes may use a folder.  Only the holder of its lock writes or removes files to make room;
    readers need no lock, as a file has all its bytes as soon as it has its name.

    Args:
        root: the folder, which is made if it does not exist.
        fingerprint: of the model, whose files have a folder of their own in it.
        limit: most bytes of all files, those of other models included.

    Attributes:
        found: bytes of the model's own files at the start.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, root: Path, fingerprint: str, limit: int) -> None:
        self.root = root
        self.fingerprint = fingerprint
        self.limit = limit
        self._own = root / fingerprint
        self._own.mkdir(parents=True, exist_ok=True)
        with self._locked() as handle:
            self._remove_scratch()
            files = list(self._files())
            total = sum(file.size for file in files)
            _set_counter(handle, total if total <= limit else self._make_room(0))
        own = os.path.join(self._own, "")
        self.found = sum(file.size for file in files if file.path.startswith(own))

    @property
    def nbytes(self) -> int:
        """Bytes of all files, as far as the processes that write them have counted."""
        try:
            return int.from_bytes((self.root / _COUNTER).read_bytes(), "little")
        except OSError:
            return 0

    def path(self, digest: bytes, kind: str) -> Path:
        """Returns the path of a prefix's file; ``kind`` is ``kv`` or ``state``."""
        name = digest.hex()
        return self._own / name[:2] / f"{name}.{kind}{SUFFIX}"

    def touch(self, path: Path, place: int = 0, now: int | None = None) -> bool:
        """Marks a file as used; False if it does not exist.

        Args:
            path: the file.
            place: number of its block in the sequence.
            now: nanoseconds; None: the present time.
        """
        used = (time.time_ns() if now is None else now) - place * _STEP
        try:
            os.utime(path, ns=(used, used))
        except FileNotFoundError:
            return False
        return True

    def store(self, path: Path, size: int, write: Callable[[Path], None]) -> None:
        """Writes a file, after others have made room for it.

        Args:
            path: the file; it stays as it is if it exists.
            size: its bytes.
            write: writes it.

        Raises:
            OSError: it cannot be written.
        """
        with self._locked() as handle:
            if path.exists():
                return
            total = _counter(handle)
            if total + size > self.limit:
                total = self._make_room(size)
                _set_counter(handle, total)
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)
            _set_counter(handle, total + size)

    def _make_room(self, size: int) -> int:
        """Removes the files that were not used for longest; returns the bytes of those that are left."""
        files = sorted(self._files())
        total = sum(file.size for file in files)
        most = min(self.limit - size, int(_KEPT * self.limit))
        for file in files:
            if total <= most:
                break
            with suppress(FileNotFoundError):
                os.unlink(file.path)
            total -= file.size
        return total

    def _files(self) -> Iterator[_File]:
        for entry in self._entries():
            if entry.name.endswith(SUFFIX):
                with suppress(FileNotFoundError):
                    state = entry.stat()
                    yield _File(state.st_mtime_ns, state.st_size, entry.path)

    def _remove_scratch(self) -> None:
        """Removes what processes that were killed left behind; nobody else writes while the lock is held."""
        for entry in self._entries():
            if not entry.name.endswith(SUFFIX):
                with suppress(FileNotFoundError):
                    os.unlink(entry.path)

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        """Yields the files of all models that have the depth of a prefix cache's files."""
        for model in _folders(self.root):
            for part in _folders(model):
                with suppress(FileNotFoundError), os.scandir(part) as entries:
                    yield from (entry for entry in entries if entry.is_file(follow_symlinks=False))

    @contextmanager
    def _locked(self) -> Iterator[int]:
        handle = os.open(self.root / _COUNTER, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield handle
        finally:
            os.close(handle)


def _folders(path: str | Path) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []


def _counter(handle: int) -> int:
    return int.from_bytes(os.pread(handle, 8, 0), "little")


def _set_counter(handle: int, value: int) -> None:
    os.pwrite(handle, value.to_bytes(8, "little"), 0)
