"""A plan's constants: what they are made of in a checkpoint's files, and making them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_armllm.llm.plan_cache.tensor_files import TensorLocation, read_into, tensor_locations
from torch_armllm.system.dtypes import dtype_name
from torch_armllm.system.huge_pages import prefer_huge

_LINE = 64
_LITERALS = 1 / 8
"""Of all constants' bytes: most that an entry holds itself."""

Recipe = dict[str, Any]


def _place(tensor: Tensor) -> tuple[int, int]:
    """First byte, and the one behind the last."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def _view(tensor: Tensor, of: Tensor) -> Recipe:
    offset = (tensor.data_ptr() - of.data_ptr()) // tensor.element_size()
    return {"shape": list(tensor.shape), "stride": list(tensor.stride()), "offset": offset}


def describe(
    constants: Sequence[Tensor], model: nn.Module, folder: Path
) -> tuple[list[Recipe], dict[str, Tensor]] | None:
    """What constants are made of: tensors of files, parts put together, or values of their own.

    Returns:
        A recipe for each, and the values that no file holds; None where those would be too many.
    """
    files = tensor_locations(folder)
    held = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    named = [
        (name, t.detach())
        for name, t in chain(*held)
        if name in files
        and files[name].shape == tuple(t.shape)
        and files[name].dtype == t.dtype
        and t.numel()
    ]
    recipes: list[Recipe] = []
    values: dict[str, Tensor] = {}
    for tensor in constants:
        recipe = _recipe(tensor, named)
        if recipe is None:
            recipe = {"value": str(len(values))}
            values[recipe["value"]] = tensor.detach()
        recipes.append(recipe)
    if sum(t.nbytes for t in values.values()) > _LITERALS * sum(t.nbytes for t in constants):
        return None
    return recipes, values


def _recipe(tensor: Tensor, named: Sequence[tuple[str, Tensor]]) -> Recipe | None:
    if not tensor.numel():
        return None
    begin, end = _place(tensor)
    parts = []
    for name, other in named:
        if other.dtype != tensor.dtype:
            continue
        first, last = _place(other)
        if first <= begin and end <= last and other.is_contiguous():
            return {"name": name, **_view(tensor, other)}
        if begin <= first and last <= end:
            parts.append((name, other))
    if not tensor.is_contiguous() or sum(other.numel() for _, other in parts) != tensor.numel():
        return None
    whole = {"parts": [{"name": name, **_view(other, tensor)} for name, other in parts]}
    return {**whole, "shape": list(tensor.shape), "dtype": dtype_name(tensor.dtype)}


def make(recipes: Sequence[Recipe], values: Mapping[str, Tensor], folder: Path) -> list[Tensor]:
    """The constants that `describe` described, in memory of their own, on huge pages where there are any.

    Raises:
        OSError: a file cannot be read.
        KeyError: no file holds a tensor that is needed.
    """
    files = tensor_locations(folder)
    names = dict.fromkeys(recipe["name"] for recipe in recipes if "name" in recipe)
    merged = [recipe for recipe in recipes if "parts" in recipe]
    sizes = [files[name].nbytes for name in names] + [_bytes(recipe) for recipe in merged]
    arena = torch.empty(sum(_rounded(size) for size in sizes), dtype=torch.uint8)
    prefer_huge(arena)
    spaces = iter(_cut(arena, sizes))
    whole = {n: next(spaces).view(files[n].dtype).view(files[n].shape) for n in names}
    places: list[tuple[TensorLocation, Tensor]] = [(files[name], tensor) for name, tensor in whole.items()]
    together: list[Tensor] = []
    for recipe in merged:
        tensor = next(spaces).view(_dtype(recipe)).view(recipe["shape"])
        together.append(tensor)
        for part in recipe["parts"]:
            places.append((files[part["name"]], _part(tensor, part)))
    read_into(places)
    put_together = iter(together)
    return [_constant(recipe, whole, put_together, values) for recipe in recipes]


def _constant(
    recipe: Recipe, whole: Mapping[str, Tensor], merged: Any, values: Mapping[str, Tensor]
) -> Tensor:
    if "value" in recipe:
        return values[recipe["value"]]
    if "parts" in recipe:
        found: Tensor = next(merged)
        return found
    return _part(whole[recipe["name"]], recipe)


def _part(tensor: Tensor, recipe: Recipe) -> Tensor:
    return tensor.as_strided(recipe["shape"], recipe["stride"], tensor.storage_offset() + recipe["offset"])


def _dtype(recipe: Recipe) -> torch.dtype:
    found: torch.dtype = getattr(torch, recipe["dtype"])
    return found


def _bytes(recipe: Recipe) -> int:
    return torch.Size(recipe["shape"]).numel() * _dtype(recipe).itemsize


def _rounded(size: int) -> int:
    return -(-size // _LINE) * _LINE


def _cut(arena: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    spaces, begin = [], 0
    for size in sizes:
        spaces.append(arena[begin : begin + size])
        begin += _rounded(size)
    return spaces
