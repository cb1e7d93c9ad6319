"""Reads the blocks and states of prompts from the disk, ahead of the engine."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from torch_armllm.kv_cache.disk.folder import CacheFolder
from torch_armllm.kv_cache.disk.record import DamagedError, Identity, Section, read_record
from torch_armllm.kv_cache.disk.rows import Bytes

_logger = logging.getLogger(__name__)

_THREADS = 2
_AHEAD_BYTES = 16 << 20
"""Bytes of blocks that were read and wait for the engine, about."""
_KEPT_BUFFERS = 32


class Match(NamedTuple):
    """The part of a prompt that the disk has."""

    digests: list[bytes]
    """Of the prompt's full blocks, up to the last one that is known."""
    start: int
    """Number of the first block that is on the disk and not in memory."""
    has_states: bool
    """True if the states after the last block have to be read too."""


class CachedBlockReader:
    """Threads that read files.

    Args:
        folder: of the files.
        block_bytes: of a block.
        state_bytes: of a state slot; 0: the model has no states.

    Attributes:
        bytes_read: bytes of blocks and states that were read.
    """

    def __init__(self, folder: CacheFolder, block_bytes: int, state_bytes: int) -> None:
        self.bytes_read = 0
        self.block_bytes = block_bytes
        self.state_bytes = state_bytes
        self._folder = folder
        self._buffers: deque[Bytes] = deque(maxlen=_KEPT_BUFFERS)
        self._pool = ThreadPoolExecutor(_THREADS, "armllm-prefix-reader")

    def read_block(self, digest: bytes, place: int) -> Future[Bytes | None]:
        """Starts to read a block; the result is None if there is no such file or it is damaged."""
        path = self._folder.path(digest, "kv")
        return self._pool.submit(self._read, path, digest, "block", self.block_bytes, place)

    def read_states(self, digest: bytes, place: int) -> Future[Bytes | None]:
        """Starts to read the states after a block; see `read_block`."""
        path = self._folder.path(digest, "state")
        return self._pool.submit(self._read, path, digest, "states", self.state_bytes, place)

    def reuse(self, rows: Iterable[Bytes]) -> None:
        """Takes blocks back whose bytes were copied: memory that is new costs more than the read itself."""
        self._buffers.extend(rows)

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _read(self, path: Path, digest: bytes, name: str, size: int, place: int) -> Bytes | None:
        row = self._buffer(size)
        if not size:
            return row
        identity = Identity(self._folder.fingerprint, digest)
        try:
            read_record(path, identity, Section(name, (1, size)), row)
            self._folder.touch(path, place)
        except FileNotFoundError:  # another server has removed it
            return None
        except DamagedError as error:
            _logger.warning("%s of the prefix cache is ignored and removed: %s", path, error)
            with suppress(OSError):  # of a folder that is only read
                path.unlink()
            return None
        except OSError as error:
            _logger.warning("%s of the prefix cache cannot be read: %s", path, error)
            return None
        self.bytes_read += size
        return row

    def _buffer(self, size: int) -> Bytes:
        with suppress(IndexError):
            if size == self.block_bytes:
                return self._buffers.pop()
        return np.empty(size, np.uint8)


class Loading:
    """Blocks of one prompt that are being read, in order.

    Args:
        reader: reads them.
        match: which ones.

    Attributes:
        done: number of blocks that were taken or are not needed.
    """

    def __init__(self, reader: CachedBlockReader, match: Match) -> None:
        self.done = match.start
        self._reader = reader
        self._digests = match.digests
        self._next = match.start
        self._most = max(2, _AHEAD_BYTES // max(1, reader.block_bytes))
        self._reads: deque[Future[Bytes | None]] = deque()
        self._failed = False
        last = len(match.digests) - 1
        self._states = reader.read_states(match.digests[last], last) if match.has_states else None
        self._read_ahead()

    @property
    def blocks_left(self) -> bool:
        """True if further blocks may come."""
        return not self._failed and self.done < len(self._digests)

    def wait(self, seconds: float) -> None:
        """Waits until there is something to take, or for so long."""
        first = self._reads[0] if self._reads else self._states
        if first is not None and not self._failed:
            wait([first], seconds)

    def take(self, most: int) -> list[Bytes]:
        """Returns up to so many of the next blocks, those that are read."""
        taken: list[Bytes] = []
        while len(taken) < most and self._reads and self._reads[0].done():
            row = self._reads.popleft().result()
            if row is None:
                self.cancel()
                break
            taken.append(row)
        self.done += len(taken)
        self._read_ahead()
        return taken

    def reuse(self, rows: Iterable[Bytes]) -> None:
        """Takes blocks back after their bytes were copied."""
        self._reader.reuse(rows)

    @property
    def states_ready(self) -> bool:
        """True if states were asked for, and `take_states` returns at once."""
        return self._states is not None and not self._failed and self._states.done()

    @property
    def states_left(self) -> bool:
        """True if states were asked for and may still come."""
        return self._states is not None and not self._failed

    def take_states(self) -> Bytes | None:
        """Returns the states after the last block; None if they cannot be read."""
        assert self._states is not None
        states, self._states = self._states.result(), None
        return states

    def cancel(self) -> None:
        """Stops: nothing further is taken."""
        self._failed = True
        for read in (*self._reads, *([] if self._states is None else [self._states])):
            read.cancel()
        self._reads.clear()
        self._states = None

    def _read_ahead(self) -> None:
        while not self._failed and self._next < len(self._digests) and len(self._reads) < self._most:
            self._reads.append(self._reader.read_block(self._digests[self._next], self._next))
            self._next += 1
