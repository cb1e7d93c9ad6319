"""Changes that make a valid call of an op invalid, or unusual."""

from __future__ import annotations

import dataclasses
import math
from random import Random
from typing import Any

import torch

from tests.fuzz.ops.arguments import Argument, Call, Spec

_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip
INTEGERS = (
    -1, 0, 1, 2, 3, 15, 16, 17, 31, 33, 255, 1000, 1 << 15, 1 << 20, (1 << 31) - 1, 1 << 31, -(1 << 31),
    1 << 32, 1 << 40, 1 << 52, 1 << 58, 1 << 60, (1 << 62) + 1, (1 << 63) - 1, (1 << 63) - 16,
    -(1 << 63), -(1 << 62),
)  # fmt: skip
REALS = (0.0, -0.0, -1.0, 1e-30, 1e30, 3.4e38, 1e300, math.inf, -math.inf, math.nan, 0.5)
_STRINGS = (
    "",
    "row",
    "i8",
    "g32",
    "silu",
    "none",
    "softmax",
    "float32",
    "scalar",
    "x" * 5000,
    "\0",
    "ü",
    "%s",
)
_LAYOUTS = ("padded", "transposed", "expanded", "odd")
LAYOUT = "layout"
"""The name of the mutation that changes nothing but strides."""


def _shape(spec: Spec, draw: Random) -> Spec:
    shape = list(spec.shape)
    kind = draw.randrange(6)
    if kind == 0 or not shape:
        shape.insert(draw.randint(0, len(shape)), draw.choice((1, 1, 2)))
    elif kind == 1:
        del shape[draw.randrange(len(shape))]
    elif kind == 2:
        draw.shuffle(shape)
    else:
        dim = draw.randrange(len(shape))
        n = shape[dim]
        shape[dim] = draw.choice((0, 1, max(n - 1, 0), n + 1, 2 * n, n // 2, n + 16, draw.randint(0, 40)))
    return dataclasses.replace(spec, shape=tuple(shape))


def _damage(spec: Spec, draw: Random) -> Spec:
    """Replaces a few elements."""
    values = REALS if spec.dtype.is_floating_point else (*INTEGERS, 4, 5, 6, 7, 40, 60, 100, 300)
    damage = [(draw.randrange(1 << 20), draw.choice(values)) for _ in range(draw.choice((1, 1, 2, 50)))]
    return dataclasses.replace(spec, damage=damage)


def mutate_tensor(spec: Spec, draw: Random) -> tuple[str, Argument]:
    """Returns the kind of a change, and the changed tensor."""
    kind = draw.choices(
        ("shape", "dtype", LAYOUT, "damage", "huge", "none", "wrong"), (30, 12, 25, 29, 1, 3, 0.5)
    )[0]
    if kind == "shape":
        return kind, _shape(spec, draw)
    if kind == "dtype":
        return kind, dataclasses.replace(spec, dtype=draw.choice(_DTYPES))
    if kind == LAYOUT:
        return kind, dataclasses.replace(spec, layout=draw.choice(_LAYOUTS))
    if kind == "damage":
        return kind, _damage(spec, draw)
    if kind == "huge":  # an expanded view that promises many elements
        shape = list(spec.shape) or [1]
        shape[draw.randrange(len(shape))] = draw.choice((1 << 45, 1 << 52, 1 << 59))
        return kind, dataclasses.replace(spec, shape=tuple(shape), layout="huge")
    if kind == "none":
        return kind, None
    return kind, draw.choice((1, 1.5, "x", [1]))


def _mutate(value: Argument, draw: Random) -> tuple[str, Argument]:
    if isinstance(value, Spec):
        return mutate_tensor(value, draw)
    if draw.random() < 0.02:
        return "wrong", draw.choice((None, "x", 1.5, 1 << 70, -3))
    if isinstance(value, bool):
        return "flag", not value
    if isinstance(value, int):
        near = (value - 1, value + 1, value + 15, 2 * value, -value)
        return "integer", draw.choice(near if draw.random() < 0.4 else INTEGERS)
    if isinstance(value, float):
        return "real", draw.choice(REALS)
    if isinstance(value, str):
        return "string", draw.choice(_STRINGS)
    return "added", Spec((draw.choice((0, 1, 2, 16, 40)),), draw.choice(_DTYPES), "zeros")


def mutate(call: Call, draw: Random, optional: list[str]) -> list[str]:
    """Changes a few arguments in place; returns the kinds of changes.

    Args:
        call: the arguments by name.
        draw: source of decisions.
        optional: arguments of the schema that the call may lack.
    """
    names = [*call, *(name for name in optional if name not in call)]
    kinds: list[str] = []
    for _ in range(draw.choices((0, 1, 2, 3, 5), (15, 50, 20, 10, 5))[0] if names else 0):
        name: Any = draw.choice(names)
        kind, call[name] = _mutate(call.get(name), draw)
        kinds.append(kind)
    return kinds
