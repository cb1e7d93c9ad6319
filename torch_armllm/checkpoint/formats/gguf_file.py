"""Opened GGUF files: the tensors and fields of one file, or of all parts of a split one."""

from __future__ import annotations

import mmap
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from torch_armllm.checkpoint.formats.gguf_parts import part_paths
from torch_armllm.checkpoint.formats.gguf_types import decode
from torch_armllm.checkpoint.formats.integer_weight import CHUNK, IntegerWeight, LazyRows, stacked
from torch_armllm.quant.packing import in_scale_range
from torch_armllm.quant.parallel import each
from torch_armllm.quant.schemes.base import Quantized, joined, row_chunks
from torch_armllm.system.extras import install_command

_ALL = slice(None)
OWN: tuple[Literal["C"], Literal["W"]] = ("C", "W")
"""Requirements of `np.require`: copies only mapped or non-contiguous arrays, since embeddings are large."""
_LONGEST_ARRAY = 1 << 24
"""Vocabularies and their merges are the longest arrays of a header."""


class GgufFile:
    """An opened GGUF file, with all parts of a split one.

    Attributes:
        path: the file; of a split one, its first part.
        tensors: the tensors by name, as the ``gguf`` package maps them.
        fields: the fields of its header by name.
        architecture: llama.cpp's name of the architecture.
    """

    def __init__(self, path: str) -> None:
        try:
            import gguf
        except ImportError:
            raise ImportError(f"GGUF files need gguf: {install_command('gguf')}") from None
        self._gguf = gguf
        self._readers: list[Any] = []
        self._part_of: dict[str, str] = {}
        self.tensors: dict[str, Any] = {}
        opened = _open(gguf, path)
        paths = part_paths(path, opened.fields)
        for number, part in enumerate(paths):
            reader = opened if part == path else _open(gguf, part)
            self._add(part, reader, number, len(paths))
        self.path = paths[0]
        self.fields: dict[str, Any] = self._readers[0].fields
        if "general.architecture" not in self.fields:
            raise ValueError(
                f"{self.path} is damaged or no GGUF file (no general.architecture): download it again"
            )
        self.architecture = str(self.fields["general.architecture"].contents())
        self._check_count()
        self._check_blocks()

    def _add(self, path: str, reader: Any, number: int, count: int) -> None:
        """Takes the tensors of a part.

        Raises:
            ValueError: it is the part of another file, is damaged, or has a tensor that a part before it has.
        """
        if count > 1:
            own = [_number(reader.fields.get(f"split.{name}")) for name in ("no", "count")]
            if own != [number, count]:
                raise ValueError(
                    f"{path} says that it is part {own[0]} (from 0) of {own[1]}, and its name says {number} "
                    f"of {count}: it belongs to another file"
                )
        for tensor in reader.tensors:
            if tensor.name in self.tensors:
                raise ValueError(f"{tensor.name} is in {path} and in {self._part_of[tensor.name]}")
            self.tensors[tensor.name] = tensor
            self._part_of[tensor.name] = path
        self._readers.append(reader)
        self._check_offsets(path, reader)

    def _check_offsets(self, path: str, reader: Any) -> None:
        """Raises ValueError if tensors overlap, end behind the file, or have a wrong alignment or rank."""
        end, before, size = 0, "the header", Path(path).stat().st_size
        for tensor in sorted(reader.tensors, key=lambda item: int(item.data_offset)):
            name, begin, length = tensor.name, int(tensor.data_offset), int(tensor.n_bytes)
            if begin % reader.alignment:
                raise ValueError(
                    f"{name} in {path} begins at byte {begin}, and a multiple of "
                    f"{reader.alignment} is expected: the file is damaged"
                )
            if begin < end:
                raise ValueError(
                    f"{name} in {path} begins at byte {begin}, and {before} before it ends at {end}: "
                    "the file is damaged"
                )
            if begin + length > size:
                raise ValueError(
                    f"{name} in {path} ends at byte {begin + length}, and the file has {size}: it is "
                    "cut short"
                )
            if not 1 <= len(tensor.shape) <= 3 or int(tensor.n_elements) == 0:
                raise ValueError(
                    f"{name} in {path} has the shape {self.shape(name)}, and one to three sizes are expected"
                )
            end, before = begin + length, name

    def _check_count(self) -> None:
        """Raises ValueError if the parts have fewer or more tensors than their header says."""
        expected = _number(self.fields.get("split.tensors.count"))
        if len(self._readers) > 1 and expected not in (None, len(self.tensors)):
            raise ValueError(
                f"{self.path} and its other parts have {len(self.tensors)} tensors, and its header says "
                f"{expected}: a part is damaged"
            )

    def _check_blocks(self) -> None:
        """Raises ValueError if the header counts more blocks than have tensors.

        The map of names takes time that grows with the square of this count.
        """
        count = _number(self.fields.get(f"{self.architecture}.block_count"))
        numbers = [int(found[1]) for name in self.tensors if (found := re.match(r"blk\.(\d+)\.", name))]
        if count is not None and count > 1 + max(numbers, default=-1):
            raise ValueError(
                f"{self.path} says that it has {count} blocks, and its tensors are of "
                f"{1 + max(numbers, default=-1)}: the file is damaged"
            )

    def type_name(self, name: str) -> str:
        """Returns the type of a tensor, such as ``Q4_1``."""
        return str(self.tensors[name].tensor_type.name)

    def bits(self, name: str) -> float:
        """Returns the bits per weight of a tensor."""
        tensor = self.tensors[name]
        return 8 * float(tensor.n_bytes) / float(tensor.n_elements)

    def shape(self, name: str) -> list[int]:
        """Returns the shape of a tensor, rows before columns."""
        return [int(size) for size in reversed(self.tensors[name].shape)]

    def floats(self, name: str, rows: slice = _ALL) -> Tensor:
        """Returns a tensor of any type, or some of its rows, as float32."""
        tensor = self.tensors[name]
        if self.type_name(name) == "BF16":
            return torch.from_numpy(np.array(tensor.data[rows])).view(torch.bfloat16).float()
        try:
            value = self._gguf.dequantize(tensor.data[rows], tensor.tensor_type)
        except NotImplementedError as error:
            raise ValueError(
                f"{name} is of type {self.type_name(name)}, which the gguf package cannot decode"
            ) from error
        return torch.from_numpy(np.require(value, np.float32, OWN))

    def release(self) -> None:
        """Drops the pages that were read from the process's memory; the page cache may keep them."""
        for reader in self._readers:
            mapping: Any = getattr(reader.data, "_mmap", None)
            if hasattr(mapping, "madvise") and hasattr(mmap, "MADV_DONTNEED"):
                mapping.madvise(mmap.MADV_DONTNEED)

    def matrix(self, name: str) -> LazyRows:
        """Returns a tensor (rows, columns) as floats that are decoded on use."""
        return LazyRows(self.shape(name), lambda rows: self.floats(name, rows))

    def integers(self, name: str) -> IntegerWeight:
        """Returns a tensor of a type of `EXACT`: (rows, columns), or experts' (E, rows, columns)."""
        kind, data = self.type_name(name), self.tensors[name].data

        def part(rows: slice | int) -> Quantized:
            found = decode(kind, torch.from_numpy(np.array(data[rows])))
            offsets = found.scales if found.offsets is None else found.offsets
            if not (in_scale_range(found.scales) and in_scale_range(offsets)):
                raise ValueError(
                    f"{name} in {self._part_of[name]} has a scale that is NaN, infinite or above 2^100: the "
                    "file is damaged; download it again"
                )
            return found

        if data.ndim == 2:
            rows, columns = self.shape(name)
            return IntegerWeight(joined(each(part, row_chunks(rows, columns, CHUNK))))
        return stacked([IntegerWeight(one) for one in each(part, range(len(data)))])


def _number(field: Any) -> int | None:
    value = None if field is None else field.contents()
    return value if isinstance(value, int) else None


def _open(gguf: Any, path: str) -> Any:
    try:
        return _bounded_reader(gguf, path)
    except Exception as error:  # whatever the header's bytes lead the package to
        raise ValueError(f"{path} is damaged or no GGUF file ({error}): download it again") from error


def _bounded_reader(gguf: Any, path: str) -> Any:
    """Opens a file by a reader that refuses lengths that the file cannot have, instead of counting to them.

    Raises:
        ValueError: a field or tensor ends behind the file, or an array is too long.
    """

    class Reader(gguf.GGUFReader):  # type: ignore[misc,name-defined]  # imported on use
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            end = offset + np.dtype(dtype).itemsize * int(count)
            if end > len(self.data):
                raise ValueError(f"a part ends at byte {end}, and the file has {len(self.data)}: cut short?")
            return super()._get(offset, dtype, count, override_order)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type == gguf.GGUFValueType.ARRAY:
                length = int(self._get(orig_offs + 4, np.uint64)[0])
                if length > _LONGEST_ARRAY:
                    raise ValueError(f"an array of its header has {length} items")
            return super()._get_field_parts(orig_offs, raw_type)

    return Reader(path)
