"""The layers of a program whose experts may stay on disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from torch_armllm.ops.tables import ENUMS, INSTRUCTIONS

_WIDTHS = {"view": 5}
"""Integers of a field; 1 where nothing else is said."""


class ExpertLayer(NamedTuple):
    """A layer of experts in a program.

    Attributes:
        gate_up: index of the constant.
        down: index of the constant.
        gate_up_stride: position, in the program's integers, of the bytes from one expert to the next.
        down_stride: likewise.
    """

    gate_up: int
    down: int
    gate_up_stride: int
    down_stride: int


def expert_layers(integers: Sequence[int]) -> list[ExpertLayer]:
    """Returns the layers of experts of an encoded program, in the order of their computation."""
    form = INSTRUCTIONS["moe"]
    places, width = {}, 0
    for field in form.fields:
        places[field.name] = width
        width += _WIDTHS.get(field.kind, 1)
    constant = ENUMS["Space"]["constant"]
    layers = []
    for opcode, at in _instructions(integers):
        if opcode != form.opcode:
            continue
        spaces = [integers[at + places[name]] for name in ("gate_up", "down")]
        if spaces == [constant, constant]:
            indices = [integers[at + places[name] + 1] for name in ("gate_up", "down")]
            strides = [at + places[f"{name}_expert_stride"] for name in ("gate_up", "down")]
            layers.append(ExpertLayer(*indices, *strides))
    return layers


def with_strides(
    integers: Sequence[int], layers: Sequence[ExpertLayer], constants: Sequence[Tensor]
) -> list[int]:
    """Returns a program whose layers of experts have the strides that their constants have now."""
    changed = list(integers)
    for layer in layers:
        changed[layer.gate_up_stride] = constants[layer.gate_up].stride(0)
        changed[layer.down_stride] = constants[layer.down].stride(0)
    return changed


def _instructions(integers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the opcode of each instruction, and the position of its fields."""
    at = 2 + 2 * integers[1]
    for _ in range(integers[at]):
        opcode, size = integers[at + 1], integers[at + 2]
        yield opcode, at + 3
        at += 2 + size
