"""Writes blocks and states to the disk in the background."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakSet

from torch_armllm.kv_cache.block_manager import BlockManager
from torch_armllm.kv_cache.disk.digests import prefix_digests
from torch_armllm.kv_cache.disk.folder import CacheFolder
from torch_armllm.kv_cache.disk.record import Identity, Section, file_size, write_record
from torch_armllm.kv_cache.disk.rows import Bytes, Rows

_logger = logging.getLogger(__name__)

_LARGEST_QUEUE = 1024
"""Sequences whose blocks wait; the oldest ones give way, and are not written."""
_MAPPED_BYTES = 1 << 30
"""Most bytes of the KV cache that are mapped at the start."""
_SHARE = 1 / 200
"""Share of a core that the thread takes while sequences run. Threads that compute wait for each other, so
that each millisecond costs all of them several."""
_LOWEST_PRIORITY = 19
_RETRY = 60.0
"""Seconds after which a disk that was full, or was only read, is tried again."""
_END_WAIT = 10.0
"""Seconds that the end of the process may wait for the disk."""


@dataclass
class _Prefix:
    """Blocks of a sequence that left; they stay in the cache until others need the memory."""

    token_ids: list[int]
    blocks: list[int]
    contents: list[int]
    """Content numbers of the blocks in the prefix cache."""
    checkpoints: dict[int, tuple[int, int]]
    """Slot, and the number of its checkpoint, of the states after so many blocks."""
    now: int = field(default_factory=time.time_ns)


class BlockWriter:
    """A thread that writes the blocks of sequences that ended, while they lie in the cache.

    It needs no copy of a block from the thread of the engine, and makes nothing wait: it copies a block, and
    then looks whether the prefix cache still knows it under the same number, which is never given twice. A
    block that has been given away since is not written. The thread has the lowest priority, and rests after
    each file while sequences run. After a file that could not be written it rests for a minute, in which
    sequences are not written, and then tries again.

    Args:
        folder: of the files.
        manager: of the blocks and state slots.
        blocks: bytes of the blocks.
        states: bytes of the state slots.

    Attributes:
        bytes_written: bytes of the files that were written.
        dropped: blocks and states that were not written as their memory was needed before.
    """

    def __init__(self, folder: CacheFolder, manager: BlockManager, blocks: Rows, states: Rows) -> None:
        self.bytes_written = 0
        self.dropped = 0
        self._folder = folder
        self._manager = manager
        self._blocks = blocks
        self._states = states
        self._queue: deque[_Prefix] = deque()
        self._changed = threading.Condition()
        self._busy = False
        self._closing = False
        self._awaited = 0
        self._works = True
        self._paused_until = 0.0 if folder.problem is None else time.monotonic() + _RETRY
        self._rested = 0.0
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="armllm-prefix-writer", daemon=True)
        self._thread.start()
        _writers.add(self)

    def leave(self, token_ids: Sequence[int], length: int) -> None:
        """Notes the blocks of a sequence that ends, before they are given back.

        Args:
            token_ids: of the sequence.
            length: tokens that are computed.
        """
        manager, size = self._manager, self._manager.block_size
        if not self._works or length < size or time.monotonic() < self._paused_until:
            return
        cache = manager.prefix_cache
        assert cache is not None
        blocks = manager.find(token_ids, length)
        contents = [cache.content(block) for block in blocks]
        checkpoints = {}
        if (states := manager.states) is not None:
            for count, content in enumerate(contents, 1):
                if (slot := states.find(content)) is not None:
                    checkpoints[count] = slot, states.number(slot)
        with self._changed:
            self._queue.append(_Prefix(list(token_ids[: len(blocks) * size]), blocks, contents, checkpoints))
            if len(self._queue) > _LARGEST_QUEUE:
                self.dropped += len(self._queue.popleft().blocks)
            self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Waits until everything is written; False if that takes longer than so many seconds."""
        with self._changed:
            self._awaited += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: not self._queue and not self._busy, timeout)
            finally:
                self._awaited -= 1

    def close(self) -> None:
        """Has the thread end when it has written what is left, and does not wait for it."""
        if os.getpid() != self._process:
            return
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def join(self) -> None:
        """Ends the thread, and waits for it, but no more than a few seconds."""
        self.close()
        if os.getpid() == self._process:
            self._thread.join(_END_WAIT)

    def _run(self) -> None:
        if sys.platform == "linux":  # elsewhere threads have no number among the processes
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        self._map_pages()
        self._rested = time.thread_time()
        while (prefix := self._next()) is not None:
            try:
                self._write_prefix(prefix)
            except OSError as error:
                self._pause(error)
            except BaseException:
                self._works = False
                raise

    def _map_pages(self) -> None:
        """Maps the memory that blocks from the disk will take: on virtual machines that takes longest."""
        size = self._blocks.nbytes
        if size:
            self._blocks.map_pages(
                min(self._manager.num_blocks, _MAPPED_BYTES // size, self._folder.found // size)
            )

    def _next(self) -> _Prefix | None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._queue or self._closing)
            if not self._queue:
                return None
            self._busy = True
            return self._queue.popleft()

    def _pause(self, error: OSError) -> None:
        """Drops what waits; says so once until files are written again."""
        first, folder = self._folder.problem is None, self._folder
        folder.problem = error.strerror or str(error)
        self._paused_until = time.monotonic() + _RETRY
        with self._changed:
            self._queue.clear()
        if first:
            _logger.warning(
                "the prefix cache cannot write to %s: %s. What is there is still read, and writing is tried "
                "again every %d s; make room there, or name another prefix_cache_dir",
                folder.root,
                folder.problem,
                _RETRY,
            )

    def _write_prefix(self, prefix: _Prefix) -> None:
        size, room = self._manager.block_size, self._folder.limit
        for place, digest in enumerate(prefix_digests(prefix.token_ids, size)):
            if not self._works:
                return
            if self._blocks.nbytes:
                room -= self._blocks.nbytes
                if room < 0:  # the end would replace the beginning, without which it is not found
                    return
                path = self._folder.path(digest, "kv")
                if not self._folder.touch(path, place, prefix.now):
                    self._write_block(prefix, place, path, digest)
            if place + 1 in prefix.checkpoints:
                path = self._folder.path(digest, "state")
                if not self._folder.touch(path, place, prefix.now):
                    self._write_states(prefix, place, path, digest)

    def _write_block(self, prefix: _Prefix, place: int, path: Path, digest: bytes) -> None:
        cache, block = self._manager.prefix_cache, prefix.blocks[place]
        assert cache is not None
        row = self._blocks.take(block)
        # a block that was overwritten during the copy has another number by now, or none
        if cache.content(block) != prefix.contents[place]:
            self.dropped += 1
            return
        self._store(path, digest, "block", row)
        self._folder.touch(path, place, prefix.now)

    def _write_states(self, prefix: _Prefix, place: int, path: Path, digest: bytes) -> None:
        states = self._manager.states
        assert states is not None
        slot, number = prefix.checkpoints[place + 1]
        row = self._states.take(slot)
        if states.find(prefix.contents[place]) != slot or states.number(slot) != number:
            self.dropped += 1
            return
        self._store(path, digest, "states", row)
        self._folder.touch(path, place, prefix.now)

    def _store(self, path: Path, digest: bytes, name: str, row: Bytes) -> None:
        section = Section(name, (1, len(row)))
        size = file_size([section])
        if size > self._folder.limit:
            return
        identity = Identity(self._folder.fingerprint, digest)
        problem = self._folder.problem
        self._folder.store(path, size, lambda free: write_record(free, identity, [section], [row]))
        if problem is not None and self._folder.problem is None:
            _logger.info("the prefix cache writes to %s again", self._folder.root)
        self.bytes_written += size
        self._rest()

    def _rest(self) -> None:
        """Waits while sequences run, in proportion to the time that the last file took of a core."""
        now = time.thread_time()
        spent, self._rested = now - self._rested, now
        with self._changed:
            if self._manager.usage and not (self._closing or self._awaited):
                self._changed.wait(spent / _SHARE)


_writers: WeakSet[BlockWriter] = WeakSet()


@atexit.register
def _join_all() -> None:
    for each in list(_writers):
        each.join()
