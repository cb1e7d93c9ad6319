"""The file that counts the bytes of a prefix cache, and is its lock."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch_armllm.system.own_files import UntrustedFileError, open_own

_logger = logging.getLogger(__name__)

_SIZE = 8
"""Bytes of the number."""


class FileCounter:
    """A number in a file, which is locked by whoever changes it.

    A file that is not this user's own is replaced, and never written through.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def peek(self) -> int:
        """Returns the number without the lock; 0 if there is none."""
        try:
            handle = open_own(self._path)
        except OSError:
            return 0
        try:
            return get(handle)
        finally:
            os.close(handle)

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Holds the lock during a block, and yields the file's handle for `get` and `put`.

        Raises:
            OSError: the file cannot be written.
        """
        handle = self._open()
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield handle
        finally:
            os.close(handle)

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT
        try:
            return open_own(self._path, flags)
        except UntrustedFileError as error:
            _logger.warning("%s of the prefix cache is replaced, as %s", self._path, error.strerror)
            self._path.unlink()
            return open_own(self._path, flags)


def get(handle: int) -> int:
    """Returns the number; any bytes are one."""
    return int.from_bytes(os.pread(handle, _SIZE, 0), "little")


def put(handle: int, value: int) -> None:
    """Writes the number, and nothing else stays in the file."""
    os.pwrite(handle, value.to_bytes(_SIZE, "little"), 0)
    os.ftruncate(handle, _SIZE)
