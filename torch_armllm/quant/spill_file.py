"""Temporary storage of packed weights, until all layers are packed and the float weights can be freed."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from typing import IO

import torch
from torch import Tensor, nn

_IN_MEMORY = 16 << 20
_DISK_FOLDER = "/var/tmp"  # /tmp is in memory on many systems


class SpillFile:
    """Holds the buffers of modules: a few in memory, the others in a temporary file.

    Without it, a run that must be able to leave the model unchanged would need memory for the float weights
    and the packed weights at the same time.  If no file can be written, all buffers stay in memory.
    """

    def __init__(self, in_memory: int | None = _IN_MEMORY) -> None:
        """``in_memory``: bytes kept in memory before a file is used; None: never use a file."""
        self._memory_left = in_memory or 0
        self._file: IO[bytes] | None = None
        self._full = in_memory is None
        self._stored: dict[nn.Module, dict[str, list[Tensor | _Stored]]] = {}

    def store(self, module: nn.Module) -> None:
        """Stores a module's buffers, except those on the meta device, whose rows `append` has stored."""
        for name, buffer in list(module.named_buffers(recurse=False)):
            if not buffer.is_meta:
                self.append(module, name, buffer)
                module._buffers[name] = torch.empty_like(buffer, device="meta")

    def append(self, module: nn.Module, name: str, rows: Tensor) -> None:
        """Stores the next rows of a buffer that is on the meta device in the module."""
        self._stored.setdefault(module, {}).setdefault(name, []).append(self._put(rows))

    def load(self, module: nn.Module) -> None:
        """Moves a module's buffers back into the module."""
        for name, pieces in self._stored.pop(module, {}).items():
            empty = module._buffers[name]
            assert empty is not None
            module._buffers[name] = self._join(pieces, empty)

    def peek(self, module: nn.Module) -> dict[str, Tensor]:
        """Returns a module's buffers without removing them."""
        buffers = {}
        for name, pieces in self._stored.get(module, {}).items():
            empty = module._buffers[name]
            assert empty is not None
            buffers[name] = self._join(list(pieces), empty)
        return buffers

    def _join(self, pieces: list[Tensor | _Stored], empty: Tensor) -> Tensor:
        if len(pieces) == 1 and isinstance(pieces[0], Tensor):
            return pieces[0]
        joined = torch.empty_like(empty, device="cpu")
        remaining = joined
        while pieces:
            piece = pieces.pop(0)
            if isinstance(piece, Tensor):
                remaining[: len(piece)] = piece
                remaining = remaining[len(piece) :]
            else:
                self._read(piece.begin, remaining[: piece.rows])
                remaining = remaining[piece.rows :]
        assert not len(remaining), "a buffer lacks rows"
        return joined

    def _put(self, rows: Tensor) -> Tensor | _Stored:
        if rows.nbytes <= self._memory_left or self._full:
            self._memory_left -= rows.nbytes
            return rows
        try:
            if self._file is None:
                # closed and deleted with this object
                self._file = tempfile.TemporaryFile(prefix="torch_armllm-", buffering=0, dir=_folder())  # noqa: SIM115
            return _Stored(self._write(self._file, rows), len(rows))
        except OSError:  # a full or a read-only disk
            self._full = True
            return rows

    @staticmethod
    def _write(file: IO[bytes], tensor: Tensor) -> int:
        begin = file.seek(0, 2)
        remaining = _bytes(tensor.contiguous())
        while remaining:
            remaining = remaining[file.write(remaining) :]
        return begin

    def _read(self, begin: int, tensor: Tensor) -> None:
        assert self._file is not None
        self._file.seek(begin)
        remaining = _bytes(tensor)
        while remaining:
            count = self._file.readinto(remaining)  # type: ignore[attr-defined]  # typing knows no raw files
            if not count:
                raise OSError("the temporary file of the quantized weights is truncated")
            remaining = remaining[count:]


@dataclass(frozen=True)
class _Stored:
    """Position and number of a buffer's rows in the file."""

    begin: int
    rows: int


def _folder() -> str | None:
    """Returns the folder of the file: None (the environment's choice), or a folder on a disk."""
    chosen = any(os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    return None if chosen or not os.access(_DISK_FOLDER, os.W_OK) else _DISK_FOLDER


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data
