"""Locations of tensors in a folder's safetensors files, and parallel reads from there."""

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
_PIECE = 8 << 20  # bytes per read
_BUFFERS = 512  # per read; Linux allows 1024
_THREADS = 8


@dataclass(frozen=True)
class TensorLocation:
    """Location of a tensor in a file."""

    file: Path
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def tensor_locations(folder: Path) -> dict[str, TensorLocation]:
    """Returns the locations of all tensors by name, except for dtypes that no plan uses."""
    locations: dict[str, TensorLocation] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
        for name, info in header.items():
            if name != "__metadata__" and info["dtype"] in _TYPES:
                begin = 8 + size + info["data_offsets"][0]
                locations[name] = TensorLocation(file, begin, tuple(info["shape"]), _TYPES[info["dtype"]])
    return locations


def weight_bytes(folder: Path) -> int:
    """Returns the bytes of a folder's weights."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def read_into(reads: Iterable[tuple[TensorLocation, Tensor]]) -> None:
    """Reads tensors from files; the target tensors may be strided.

    Raises:
        OSError: a file cannot be read, or is too short.
    """
    pieces = []
    handles: dict[Path, int] = {}
    try:
        for location, tensor in reads:
            if location.file not in handles:
                handles[location.file] = os.open(location.file, os.O_RDONLY)
            if not location.nbytes:
                continue
            begin = location.begin
            for targets in _pieces(tensor):
                pieces.append((handles[location.file], begin, targets))
                begin += sum(map(len, targets))
        with ThreadPoolExecutor(_THREADS) as pool:
            for _ in pool.map(_read, pieces):
                pass
    finally:
        for handle in handles.values():
            os.close(handle)


def _pieces(tensor: Tensor) -> Iterator[list[memoryview]]:
    """Splits a tensor's memory, in element order, into the buffers of single reads."""
    piece: list[memoryview] = []
    size = 0
    for row in _rows(tensor):
        buffer = row.view(-1).view(torch.uint8).numpy().data
        for at in range(0, len(buffer), _PIECE):
            part = buffer[at : at + _PIECE]
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
            raise OSError("a checkpoint file is truncated")
        begin += count
        while targets and count >= len(targets[0]):
            count -= len(targets[0])
            targets = targets[1:]
        if count:
            targets = [targets[0][count:], *targets[1:]]
