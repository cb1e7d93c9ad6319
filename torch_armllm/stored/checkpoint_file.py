"""Where the tensors of a folder's safetensors files lie, and reading them in parallel."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_TYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
_PIECE = 8 << 20  # bytes that a thread reads at once
_THREADS = 8


@dataclass(frozen=True)
class Stored:
    """A tensor of a file."""

    file: Path
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its size."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """All tensors of a folder's safetensors files, by name; those of types that no plan uses are left out."""
    found: dict[str, Stored] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
        for name, said in header.items():
            if name != "__metadata__" and said["dtype"] in _TYPES:
                begin = 8 + size + said["data_offsets"][0]
                found[name] = Stored(file, begin, tuple(said["shape"]), _TYPES[said["dtype"]])
    return found


def read_into(places: Iterable[tuple[Stored, Tensor]]) -> None:
    """Fills dense tensors with what files hold.

    Raises:
        OSError: a file cannot be read, or ends too early.
    """
    pieces = []
    handles: dict[Path, int] = {}
    try:
        for stored, tensor in places:
            if stored.file not in handles:
                handles[stored.file] = os.open(stored.file, os.O_RDONLY)
            if not stored.nbytes:
                continue
            target = tensor.view(-1).view(torch.uint8).numpy().data
            pieces += [
                (handles[stored.file], stored.begin + at, target[at : at + _PIECE])
                for at in range(0, stored.nbytes, _PIECE)
            ]
        with ThreadPoolExecutor(_THREADS) as pool:
            for _ in pool.map(_read, pieces):
                pass
    finally:
        for handle in handles.values():
            os.close(handle)


def _read(piece: tuple[int, int, memoryview]) -> None:
    handle, begin, target = piece
    while len(target):
        count = os.preadv(handle, [target], begin)
        if count == 0:
            raise OSError("a file of weights ends too early")
        begin, target = begin + count, target[count:]
