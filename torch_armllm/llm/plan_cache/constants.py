"""Constants of a plan: finds their sources in a checkpoint's files, and rebuilds them from there."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_armllm.llm.plan_cache.tensor_files import TensorLocation, read_into, tensor_locations
from torch_armllm.plan.expert_store import reserve
from torch_armllm.system.dtypes import dtype_name
from torch_armllm.system.huge_pages import prefer_huge

_LINE = 64
_MAX_VALUES = 1 / 8
"""Largest fraction of the constants' bytes that an entry stores itself."""

Source = dict[str, Any]
"""JSON description of a constant: a view of a file's tensor, several such tensors, or a stored value."""


def _byte_range(tensor: Tensor) -> tuple[int, int]:
    """Returns the addresses of the first byte and after the last byte."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def _view(tensor: Tensor, of: Tensor) -> Source:
    offset = (tensor.data_ptr() - of.data_ptr()) // tensor.element_size()
    return {"shape": list(tensor.shape), "stride": list(tensor.stride()), "offset": offset}


def describe(
    constants: Sequence[Tensor], model: nn.Module, folder: Path
) -> tuple[list[Source], dict[str, Tensor]] | None:
    """Finds the sources of constants: views of file tensors, concatenated parts, or values of their own.

    Returns:
        A source per constant, and the values that no file holds; None if these would be too large.
    """
    files = tensor_locations(folder)
    tensors = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    named = _in_files([(name, t.detach()) for name, t in chain(*tensors) if t.numel()], files)
    sources: list[Source] = []
    values: dict[str, Tensor] = {}
    for tensor in constants:
        source = _find_source(tensor, named)
        if source is None:
            source = {"value": str(len(values))}
            values[source["value"]] = tensor.detach()
        sources.append(source)
    if sum(t.nbytes for t in values.values()) > _MAX_VALUES * sum(t.nbytes for t in constants):
        return None
    return sources, values


def _in_files(
    named: Sequence[tuple[str, Tensor]], files: Mapping[str, TensorLocation]
) -> list[tuple[str, Tensor]]:
    """Returns the tensors that files have, by their names there.

    transformers renames some modules when it loads a checkpoint, such as Mixtral's ``block_sparse_moe``. Such
    a tensor is found by the numbers and the last part of its name, shape and dtype, if no other has the same.
    """
    renamed: defaultdict[Any, list[str]] = defaultdict(list)
    for name in set(files).difference(name for name, _ in named):
        renamed[_features(name, files[name])].append(name)
    found = []
    for name, tensor in named:
        features = _features(name, tensor)
        if name in files:
            if _features(name, files[name]) == features:
                found.append((name, tensor))
        elif len(names := renamed.get(features, [])) == 1:
            found.append((names[0], tensor))
    return found


def _features(name: str, tensor: Tensor | TensorLocation) -> tuple[Any, ...]:
    return tuple(re.findall(r"\d+", name)), name.split(".")[-1], tuple(tensor.shape), tensor.dtype


def _find_source(tensor: Tensor, named: Sequence[tuple[str, Tensor]]) -> Source | None:
    if not tensor.numel():
        return None
    begin, end = _byte_range(tensor)
    parts = []
    for name, other in named:
        if other.dtype != tensor.dtype:
            continue
        first, last = _byte_range(other)
        if first <= begin and end <= last and other.is_contiguous():
            return {"name": name, **_view(tensor, other)}
        if begin <= first and last <= end:
            parts.append((name, other))
    if not tensor.is_contiguous() or sum(other.numel() for _, other in parts) != tensor.numel():
        return None
    source = {"parts": [{"name": name, **_view(other, tensor)} for name, other in parts]}
    return {**source, "shape": list(tensor.shape), "dtype": dtype_name(tensor.dtype)}


def rebuild(
    sources: Sequence[Source], values: Mapping[str, Tensor], folder: Path, on_disk: Collection[str] = ()
) -> list[Tensor]:
    """Rebuilds the constants that `describe` has described, in new memory on huge pages if available.

    Args:
        sources: of the constants.
        values: the stored ones.
        folder: of the files.
        on_disk: names of stacked weights of experts that are not read, but get memory where they can be.

    Raises:
        OSError: a file cannot be read.
        KeyError: a needed tensor is in no file.
    """
    files = tensor_locations(folder)
    names = [name for name in _names(sources) if name not in on_disk]
    merged = [source for source in sources if "parts" in source]
    sizes = [files[name].nbytes for name in names] + [_bytes(source) for source in merged]
    arena = torch.empty(sum(_aligned(size) for size in sizes), dtype=torch.uint8)
    prefer_huge(arena)
    spaces = iter(_cut(arena, sizes))
    tensors = {n: next(spaces).view(files[n].dtype).view(files[n].shape) for n in names}
    reads: list[tuple[TensorLocation, Tensor]] = [(files[name], tensor) for name, tensor in tensors.items()]
    merged_tensors: list[Tensor] = []
    for source in merged:
        tensor = next(spaces).view(_dtype(source)).view(source["shape"])
        merged_tensors.append(tensor)
        for part in source["parts"]:
            reads.append((files[part["name"]], _part(tensor, part)))
    read_into(reads)
    tensors |= {name: reserve(*files[name].shape) for name in on_disk}
    merged_iterator = iter(merged_tensors)
    return [
        tensors[source["name"]]
        if source.get("name") in on_disk
        else _constant(source, tensors, merged_iterator, values)
        for source in sources
    ]


def total_bytes(sources: Sequence[Source], values: Mapping[str, Tensor], folder: Path) -> int:
    """Returns the bytes of all constants in memory."""
    files = tensor_locations(folder)
    read = sum(files[name].nbytes for name in _names(sources))
    merged = sum(_bytes(source) for source in sources if "parts" in source)
    return read + merged + sum(value.nbytes for value in values.values())


def _names(sources: Sequence[Source]) -> list[str]:
    """Returns the names of the tensors that sources are views of, each once."""
    return list(dict.fromkeys(source["name"] for source in sources if "name" in source))


def _constant(
    source: Source, tensors: Mapping[str, Tensor], merged: Any, values: Mapping[str, Tensor]
) -> Tensor:
    if "value" in source:
        return values[source["value"]]
    if "parts" in source:
        tensor: Tensor = next(merged)
        return tensor
    return _part(tensors[source["name"]], source)


def _part(tensor: Tensor, source: Source) -> Tensor:
    return tensor.as_strided(source["shape"], source["stride"], tensor.storage_offset() + source["offset"])


def _dtype(source: Source) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, source["dtype"])
    return dtype


def _bytes(source: Source) -> int:
    return torch.Size(source["shape"]).numel() * _dtype(source).itemsize


def _aligned(size: int) -> int:
    return -(-size // _LINE) * _LINE


def _cut(arena: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    spaces, begin = [], 0
    for size in sizes:
        spaces.append(arena[begin : begin + size])
        begin += _aligned(size)
    return spaces
