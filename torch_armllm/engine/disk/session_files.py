"""Files of single conversations: their tokens, blocks and states."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from torch_armllm.engine.disk.cached_rows import cached_rows
from torch_armllm.engine.scheduling.scheduler import Scheduler
from torch_armllm.kv_cache.disk.digests import DIGEST_SIZE, prefix_digests
from torch_armllm.kv_cache.disk.record import (
    DamagedError,
    Identity,
    Section,
    fill,
    header,
    read_header,
    write_record,
)
from torch_armllm.kv_cache.disk.rows import Bytes
from torch_armllm.plan.native import native_plan


class SessionFiles:
    """Saves what an engine has computed of a conversation, and loads it into its prefix cache.

    Args:
        runner: of the engine.
        scheduler: has its blocks.

    Raises:
        ValueError: the engine has nothing that could be saved.
    """

    def __init__(self, runner: Any, scheduler: Scheduler) -> None:
        manager = scheduler.blocks
        if native_plan(getattr(runner, "plan", None)) is None:
            raise ValueError("the model has no native plan, and its own caches are not saved")
        if manager.prefix_cache is None:
            raise ValueError(
                "sessions are part of the prefix cache: enable it, and give enough kv_cache_memory for it"
            )
        self._scheduler, self._manager = scheduler, manager
        self._blocks, self._states, self._fingerprint = cached_rows(runner)

    def holds(self, token_ids: Sequence[int]) -> bool:
        """True if all that a request with these tokens could find is in memory."""
        return len(self._find(token_ids)[0]) >= (len(token_ids) - 1) // self._manager.block_size

    def save(self, path: Path, token_ids: Sequence[int]) -> None:
        """Writes the tokens, and the blocks and states that are in memory.

        Raises:
            ValueError: not all that a request could find is in memory: see `holds`.
            OSError: the file cannot be written.
        """
        if not self.holds(token_ids):
            raise ValueError(
                f"the prefix cache has no room for all {len(token_ids)} tokens: give more kv_cache_memory"
            )
        blocks, slot = self._find(token_ids)
        sections = self._sections(len(token_ids), len(blocks), slot is not None)

        def values() -> Iterator[Bytes]:
            yield np.array(token_ids, "<i4").view(np.uint8)
            for block in blocks:
                yield self._blocks.take(block)
            if slot is not None:
                yield self._states.take(slot)

        write_record(path, self._identity(token_ids), sections, values())

    def load(self, path: Path) -> list[int]:
        """Puts a conversation into the prefix cache, and returns its tokens.

        Raises:
            ValueError: the file is of another model or damaged, or the cache has no room.
            OSError: it cannot be read.
        """
        with path.open("rb") as file:
            try:
                fields = read_header(file)
                if (found := fields["__metadata__"].get("fingerprint")) != self._fingerprint:
                    raise ValueError(
                        f"{str(path)!r} is a session of another model, dtype of the cache, kind of CPU, "
                        f"number of ranks or version of this package (its fingerprint is {found}, this "
                        f"model's {self._fingerprint}): generate from its text instead"
                    )
                return self._load(file, fields)
            except DamagedError as error:
                raise ValueError(f"{str(path)!r} is no session, or is damaged: {error}") from None

    def _load(self, file: BufferedReader, fields: dict[str, Any]) -> list[int]:
        manager = self._manager
        try:
            (length,), (count, _) = fields["tokens"]["shape"], fields["blocks"]["shape"]
            sections = self._sections(int(length), int(count), "states" in fields)
        except (KeyError, TypeError, ValueError):
            raise DamagedError("its header is wrong") from None
        size = file.tell() + sum(section.nbytes for section in sections)
        if os.fstat(file.fileno()).st_size != size or count * manager.block_size > length:
            raise DamagedError("it has another size")
        tokens, checksum = _read(file, sections[0].nbytes)
        token_ids: list[int] = tokens.view("<i4").tolist()
        if count > manager.free:
            raise ValueError(
                f"a session of {length} tokens needs {count} blocks, and {manager.free} are free: give more "
                "kv_cache_memory"
            )
        blocks = manager.allocate(count)
        try:
            for block in blocks:
                row, checksum = _read(file, self._blocks.nbytes, checksum)
                self._blocks.put(block, row)
            states = None
            if len(sections) > 2:
                states, checksum = _read(file, self._states.nbytes, checksum)
            file.seek(0)
            start = header(self._identity(token_ids), sections, checksum)
            if file.read(len(start)) != start:
                raise DamagedError("its checksum or its header is wrong")
            manager.cache_full_blocks(blocks, token_ids, 0, count * manager.block_size)
            if states is not None:
                self._keep(blocks[-1], states)
        finally:
            manager.deallocate(blocks)
        return token_ids

    def _keep(self, block: int, row: Bytes) -> None:
        """Makes states the checkpoint of a block."""
        states, cache = self._manager.states, self._manager.prefix_cache
        assert states is not None and cache is not None
        # states that are still to be copied may lie in a slot that is free by now
        if self._scheduler.states_are_settled and (slot := states.save()) is not None:
            self._states.put(slot, row)
            states.keep(slot, cache.content(block))

    def _find(self, token_ids: Sequence[int]) -> tuple[list[int], int | None]:
        if self._manager.states is None:
            return self._manager.find(token_ids, len(token_ids)), None
        blocks, slot, _ = self._manager.find_checkpoint(token_ids, len(token_ids))
        return blocks, slot

    def _sections(self, tokens: int, blocks: int, has_states: bool) -> list[Section]:
        sections = [Section("tokens", (tokens,), "I32"), Section("blocks", (blocks, self._blocks.nbytes))]
        return [*sections, Section("states", (1, self._states.nbytes))] if has_states else sections

    def _identity(self, token_ids: Sequence[int]) -> Identity:
        digest = bytes(DIGEST_SIZE)
        for digest in prefix_digests(token_ids, self._manager.block_size):  # noqa: B007  # the last one
            pass
        return Identity(self._fingerprint, digest)


def _read(file: BufferedReader, size: int, checksum: int = 0) -> tuple[Bytes, int]:
    row = np.empty(size, np.uint8)
    fill(file, row)
    return row, zlib.crc32(row.data, checksum)
