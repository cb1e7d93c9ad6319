"""Descriptions of an op's tensors, and the tensors made from them in guarded memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Literal

import torch
from torch import Tensor

from tests.fuzz.ops.memory import GuardedMemory, Region

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
Layout = Literal["contiguous", "padded", "transposed", "expanded", "odd", "huge"]
Values = Literal["normal", "unit", "bytes", "zeros"]
_POOL = 1 << 19
_REPEATED = 13


@dataclass
class Spec:
    """A tensor that a call gets."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Values | Sequence[int] | tuple[int, int] = "normal"
    """a kind, all elements in order, or as a tuple the least and the largest integer"""
    layout: Layout = "contiguous"
    at_end: bool = True
    damage: list[tuple[int, float]] = field(default_factory=list)
    """elements that get another value after the tensor was filled, by their number modulo the elements"""


Argument = Spec | int | float | bool | str | None | list[Spec] | list[int] | list[float]
Call = dict[str, Argument]


@cache
def _pool(dtype: torch.dtype, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if kind == "bytes":
        return torch.randint(0, 256, (_POOL,), generator=generator, dtype=torch.uint8)
    if dtype.is_floating_point:
        make = torch.rand if kind == "unit" else torch.randn
        return make(_POOL, generator=generator).to(dtype)
    return torch.randint(-8, 8, (_POOL,), generator=generator).to(dtype)


def _strides(shape: tuple[int, ...], layout: Layout, draw: Random) -> list[int]:
    """Returns strides in elements."""
    order = list(range(len(shape)))
    if layout == "transposed" and len(shape) >= 2:
        a, b = draw.sample(order, 2)
        order[a], order[b] = order[b], order[a]
    strides, step = [0] * len(shape), 1
    for place, dim in enumerate(reversed(order)):
        strides[dim] = step
        step *= max(shape[dim], 1)
        if (layout == "padded" and place == 0) or (layout == "odd" and draw.random() < 0.5):
            step += draw.choice((1, 3, 8, 16, 64))
    if layout == "expanded" and shape:
        strides[draw.choice(order)] = 0
    return strides


def _fill(flat: Tensor, spec: Spec, draw: Random) -> None:
    """Fills all memory of a tensor, gaps included."""
    if isinstance(spec.values, tuple):
        few = [draw.randint(*spec.values) for _ in range(_REPEATED)]
        times = math.ceil(flat.numel() / _REPEATED)
        flat.copy_(torch.tensor(few * times)[: flat.numel()])
        return
    if not isinstance(spec.values, str) or spec.values == "zeros" or flat.dtype == torch.bool:
        flat.zero_()
        return
    if spec.values == "bytes" or flat.dtype.is_complex:
        flat = flat.view(torch.uint8)
    pool = _pool(flat.dtype, spec.values)
    if flat.numel() > _POOL:
        flat.zero_()
        return
    start = draw.randrange(_POOL - flat.numel() + 1)
    flat.copy_(pool[start : start + flat.numel()])


def build(spec: Spec, memory: GuardedMemory, draw: Random) -> tuple[Tensor, Region | None]:
    """Makes a tensor and tells which memory is its own.

    Raises:
        OverflowError: the tensor would be too large.
    """
    if math.prod(max(size, 1) for size in spec.shape) * spec.dtype.itemsize >= 1 << 62:
        raise OverflowError(f"{spec.shape} is too large for a tensor")
    if spec.layout == "huge":  # one element
        flat, region = memory.take(1, spec.dtype, spec.at_end)
        flat.zero_()
        return flat.as_strided(spec.shape, [0] * len(spec.shape)), region
    strides = _strides(spec.shape, spec.layout, draw)
    empty = 0 in spec.shape
    extent = 0 if empty else 1 + sum((n - 1) * s for n, s in zip(spec.shape, strides, strict=True))
    flat, region = memory.take(extent, spec.dtype, spec.at_end)
    _fill(flat, spec, draw)
    tensor = flat.as_strided(spec.shape, strides)
    if not isinstance(spec.values, (str, tuple)) and not empty:
        most = torch.iinfo(torch.int64)
        given = [min(max(int(v), most.min), most.max) for v in spec.values]
        once = tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in strides)]
        count = once.numel()
        given = (given * math.ceil(count / max(len(given), 1)))[:count] or [0] * count
        once.copy_(torch.tensor(given).view(once.shape))
    for number, value in spec.damage:
        if flat.numel():
            _set(flat, number % flat.numel(), value)
    return tensor, region


def _set(flat: Tensor, index: int, value: float) -> None:
    if flat.dtype.is_floating_point or flat.dtype.is_complex:
        most = torch.finfo(flat.dtype).max
        flat[index] = min(max(value, -most), most) if math.isfinite(value) else value
    elif math.isfinite(value):
        number = int(value)
        if flat.dtype != torch.bool:
            limits = torch.iinfo(flat.dtype)
            number = min(max(number, limits.min), limits.max)
        else:
            number = number % 2
        flat[index] = number
