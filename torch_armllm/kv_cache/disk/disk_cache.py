"""The prefix cache on disk: what leaves the KV cache is written, and is found again after a restart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch_armllm.kv_cache.block_manager import BlockManager
from torch_armllm.kv_cache.disk.digests import prefix_digests
from torch_armllm.kv_cache.disk.folder import CacheFolder
from torch_armllm.kv_cache.disk.reader import CachedBlockReader, Loading, Match
from torch_armllm.kv_cache.disk.rows import Rows
from torch_armllm.kv_cache.disk.writer import BlockWriter


class DiskCounts(NamedTuple):
    """Counts of a `DiskPrefixCache` since it was opened."""

    hits: int
    """Prompt tokens that were read from the disk."""
    misses: int
    """Prompt tokens that were neither in memory nor on the disk."""
    bytes_read: int
    bytes_written: int
    dropped: int
    """Blocks and states that were not written, as their memory was needed before."""
    nbytes: int
    """Bytes of all files in the folder now."""
    limit: int
    """Bytes that they may have."""


class DiskPrefixCache:
    """The files of a model's blocks and states.

    A file has one block with the keys and values of all layers, or the states of all layers after one block.
    It is found by the digest of all tokens up to its end.

    Args:
        folder: of the files.
        manager: of the blocks and state slots.
        blocks: bytes of the blocks; none if no layer has keys and values.
        states: bytes of the state slots.

    Attributes:
        folder: of the files.
        blocks: see above.
        states: see above.
        hits: prompt tokens that were read from the disk.
        misses: prompt tokens that were neither in memory nor on the disk.
    """

    def __init__(self, folder: CacheFolder, manager: BlockManager, blocks: Rows, states: Rows) -> None:
        self.folder = folder
        self.blocks = blocks
        self.states = states
        self.hits = 0
        self.misses = 0
        self._manager = manager
        self._writer = BlockWriter(folder, manager, blocks, states)
        self._reader = CachedBlockReader(folder, blocks.nbytes, states.nbytes)

    def load(self, token_ids: Sequence[int], length: int) -> Loading | None:
        """Starts to read what memory lacks of ``token_ids[:length]``; None if the disk does not have more."""
        manager, size = self._manager, self._manager.block_size
        if manager.states is None:
            known = manager.find(token_ids, length)
            usable = len(known)
        else:
            found, _, known = manager.find_checkpoint(token_ids, length)
            usable = len(found)
        match = self._match(token_ids[: length // size * size], len(known), usable)
        if len(match.digests) <= usable:
            self.misses += length - usable * size
            return None
        self.misses += length - len(match.digests) * size
        return Loading(self._reader, match)

    def _match(self, token_ids: Sequence[int], known: int, usable: int) -> Match:
        """Finds the longest prefix that has all its files.

        Args:
            token_ids: of full blocks.
            known: blocks that are in memory.
            usable: blocks that are in memory, with the states after them.
        """
        folder, with_states = self.folder, self._manager.states is not None
        digests: list[bytes] = []
        longest = usable
        for place, digest in enumerate(prefix_digests(token_ids, self._manager.block_size)):
            if place >= known and self.blocks.nbytes and not folder.holds(folder.path(digest, "kv")):
                break
            digests.append(digest)
            if place >= usable and (not with_states or folder.holds(folder.path(digest, "state"))):
                longest = place + 1
        return Match(digests[:longest], min(known, longest), with_states)

    def leave(self, token_ids: Sequence[int], length: int) -> None:
        """Has the blocks of a sequence written, if they are not yet; see `BlockWriter.leave`."""
        self._writer.leave(token_ids, length)

    def flush(self, timeout: float = 60.0) -> bool:
        """Waits until all that has left is written; False if that takes longer than so many seconds."""
        return self._writer.flush(timeout)

    def counts(self) -> DiskCounts:
        """Returns what has happened so far."""
        writer = self._writer
        return DiskCounts(
            hits=self.hits,
            misses=self.misses,
            bytes_read=self._reader.bytes_read,
            bytes_written=writer.bytes_written,
            dropped=writer.dropped,
            nbytes=self.folder.nbytes,
            limit=self.folder.limit,
        )

    def end(self) -> None:
        """Ends all threads, and waits until what has left is written, but no more than some seconds."""
        self._writer.join()
        self._reader.close()

    def close(self) -> None:
        """Ends all threads when they have written what has left; does not wait for them."""
        self._writer.close()
        self._reader.close()
