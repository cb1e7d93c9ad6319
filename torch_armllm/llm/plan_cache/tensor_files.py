"""Where the tensors of a folder's safetensors files lie, and reading them in parallel."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
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
_BUFFERS = 512  # of one read; Linux takes 1024
_THREADS = 8


@dataclass(frozen=True)
class TensorLocation:
    """A tensor of a file."""

    file: Path
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its size."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def tensor_locations(folder: Path) -> dict[str, TensorLocation]:
    """All tensors of a folder's safetensors files, by name; those of types that no plan uses are left out."""
    found: dict[str, TensorLocation] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
        for name, said in header.items():
            if name != "__metadata__" and said["dtype"] in _TYPES:
                begin = 8 + size + said["data_offsets"][0]
                found[name] = TensorLocation(file, begin, tuple(said["shape"]), _TYPES[said["dtype"]])
    return found


def read_into(places: Iterable[tuple[TensorLocation, Tensor]]) -> None:
    """Fills tensors with what files hold; rows may lie apart.

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
            begin = stored.begin
            for targets in _pieces(tensor):
                pieces.append((handles[stored.file], begin, targets))
                begin += sum(map(len, targets))
        with ThreadPoolExecutor(_THREADS) as pool:
            for _ in pool.map(_read, pieces):
                pass
    finally:
        for handle in handles.values():
            os.close(handle)


def _pieces(tensor: Tensor) -> Iterator[list[memoryview]]:
    """A tensor's memory in the order of its elements, in pieces for one read each."""
    piece: list[memoryview] = []
    size = 0
    for row in _rows(tensor):
        whole = row.view(-1).view(torch.uint8).numpy().data
        for at in range(0, len(whole), _PIECE):
            part = whole[at : at + _PIECE]
            if piece and (size + len(part) > _PIECE or len(piece) == _BUFFERS):
                yield piece
                piece, size = [], 0
            piece.append(part)
            size += len(part)
    if piece:
        yield piece


def _rows(tensor: Tensor) -> Iterator[Tensor]:
    if tensor.is_contiguous():
        yield tensor
    else:
        for part in tensor:
            yield from _rows(part)


def _read(piece: tuple[int, int, list[memoryview]]) -> None:
    handle, begin, targets = piece
    while targets:
        count = os.preadv(handle, targets, begin)
        if count == 0:
            raise OSError("a file of weights ends too early")
        begin += count
        while targets and count >= len(targets[0]):
            count -= len(targets[0])
            targets = targets[1:]
        if count:
            targets = [targets[0][count:], *targets[1:]]
