"""The folder of a prefix cache: names of files, their total size, and which of them give way."""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from torch_armllm.kv_cache.disk.counter import FileCounter, get, put
from torch_armllm.kv_cache.disk.record import SUFFIX
from torch_armllm.system.own_files import UntrustedFileError, check_own_folder, complaint

_logger = logging.getLogger(__name__)

_COUNTER = "bytes"
"""File with the size of all files of blocks; its lock is held by whoever writes or removes some."""
_MODEL = re.compile(r"[0-9a-f]{32}")
"""Names of a model's folder; the folder of all may hold whatever else."""
_PART = re.compile(r"[0-9a-f]{2}")
_FULL = (errno.ENOSPC, errno.EDQUOT)
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
    readers need no lock, as a file has all its bytes as soon as it has its name.  Files and folders below the
    root that are not this user's own count as absent, and are named in the log.

    Args:
        root: the folder, which is made if it does not exist.
        fingerprint: of the model, whose files have a folder of their own in it.
        limit: most bytes of all files, those of other models included.

    Attributes:
        found: bytes of the model's own files at the start.
        problem: why the folder cannot be written; its files are read all the same. None: it can be.

    Raises:
        OSError: the folder cannot be used, or has no file of the model and cannot be written.
    """

    def __init__(self, root: Path, fingerprint: str, limit: int) -> None:
        self.root = root
        self.fingerprint = fingerprint
        self.limit = limit
        self.problem: str | None = None
        self._own = root / fingerprint
        self._counter = FileCounter(root / _COUNTER)
        self._named: set[str] = set()
        root.mkdir(parents=True, exist_ok=True)
        try:
            check_own_folder(root, may_be_link=True)
        except UntrustedFileError as error:
            _logger.warning(
                "%s is not this process's own folder, as %s, who may remove its files: those that this "
                "process's user did not write are not read",
                *(root, error.strerror),
            )
        try:
            self._make(self._own)
            with self._counter.locked() as handle:
                self._remove_scratch()
                put(handle, self._recount())
        except OSError as error:
            self.problem = error.strerror or str(error)
            self.found = self._bytes_of_model()
            if not self.found and not isinstance(error, UntrustedFileError) and error.errno not in _FULL:
                raise
        else:
            self.found = self._bytes_of_model()

    def _bytes_of_model(self) -> int:
        own = os.path.join(self._own, "")
        return sum(file.size for file in self._files() if file.path.startswith(own))

    def _recount(self) -> int:
        """Returns the bytes of all files, of which some are removed if they are too many."""
        total = sum(file.size for file in self._files())
        return total if total <= self.limit else self._make_room(0)

    @property
    def nbytes(self) -> int:
        """Bytes of all files, as far as the processes that write them have counted."""
        return self._counter.peek()

    def path(self, digest: bytes, kind: str) -> Path:
        """Returns the path of a prefix's file; ``kind`` is ``kv`` or ``state``."""
        name = digest.hex()
        return self._own / name[:2] / f"{name}.{kind}{SUFFIX}"

    def holds(self, path: Path) -> bool:
        """True if there is a file that this user's processes wrote; names one that they did not write."""
        try:
            for folder in (self._own, path.parent):
                check_own_folder(folder)
            state = os.lstat(path)
        except UntrustedFileError as error:
            self._name(error.filename, str(error.strerror))
            return False
        except OSError:
            return False
        if (reason := complaint(state)) is not None:
            self._name(path, reason)
        return reason is None

    def _name(self, path: str | Path, reason: str) -> None:
        """Warns of a file; once for each reason, as whoever meddles with one may do so with all."""
        if reason not in self._named:
            self._named.add(reason)
            _logger.warning(
                "%s of the prefix cache is not read, as %s; so are others like it. Remove what this process "
                "did not write",
                *(path, reason),
            )

    def touch(self, path: Path, place: int = 0, now: int | None = None) -> bool:
        """Marks a file as used; False if it does not exist.

        Args:
            path: the file.
            place: number of its block in the sequence.
            now: nanoseconds; None: the present time.
        """
        if not self.holds(path):
            return False
        used = (time.time_ns() if now is None else now) - place * _STEP
        with suppress(OSError):  # of a folder that is only read
            os.utime(path, ns=(used, used), follow_symlinks=False)
        return True

    def store(self, path: Path, size: int, write: Callable[[Path], None]) -> None:
        """Writes a file, after others have made room for it.

        Args:
            path: the file; it stays as it is if it exists.
            size: its bytes.
            write: writes it, and replaces what has its name.

        Raises:
            OSError: it cannot be written.
        """
        with self._counter.locked() as handle:
            if self.holds(path):
                return
            try:
                self._make(self._own)
                self._make(path.parent)
            except UntrustedFileError as error:
                self._name(error.filename, str(error.strerror))
                return
            if path.is_dir() and not path.is_symlink():  # which no file replaces
                return
            total = get(handle) if self.problem is None else self._recount()
            if total + size > self.limit:
                total = self._make_room(size)
                put(handle, total)
            write(path)
            put(handle, total + size)
            self.problem = None

    def _make(self, folder: Path) -> None:
        with suppress(FileExistsError):
            folder.mkdir()
        check_own_folder(folder)

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
                    state = entry.stat(follow_symlinks=False)
                    yield _File(state.st_mtime_ns, state.st_size, entry.path)

    def _remove_scratch(self) -> None:
        """Removes what processes that were killed left behind; nobody else writes while the lock is held."""
        for entry in self._entries():
            if not entry.name.endswith(SUFFIX):
                with suppress(FileNotFoundError):
                    os.unlink(entry.path)

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        """Yields the files of all models that lie where a prefix cache's files do."""
        for model in _folders(self.root, _MODEL):
            for part in _folders(model, _PART):
                with suppress(FileNotFoundError), os.scandir(part) as entries:
                    yield from (entry for entry in entries if entry.is_file(follow_symlinks=False))


def _folders(path: str | Path, names: re.Pattern[str]) -> list[str]:
    """Returns the folders in a folder that have such names, and are this user's own."""
    found = []
    with suppress(FileNotFoundError), os.scandir(path) as entries:
        for entry in entries:
            if names.fullmatch(entry.name):
                with suppress(OSError):
                    check_own_folder(entry.path)
                    found.append(entry.path)
    return found
