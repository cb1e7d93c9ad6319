"""Places of instruction fields in the integers of an encoded program, for programs that are changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_armllm.ops.tables import ENUMS, INSTRUCTIONS
from torch_armllm.plan.program import TYPES, Encoded

_VIEW = 5
"""Integers of a view."""
SPACE, INDEX = 0, 1
"""Places of a view's memory and of its number there, in the view's integers."""


def places(program: Encoded, opcode: str) -> list[dict[str, int]]:
    """Returns the place of each field, by name, of each instruction with an opcode.

    Those of lists, and of fields after one, are left out.
    """
    integers = program.integers
    at = 2 + 2 * integers[1]
    count, at = integers[at], at + 1
    found = []
    for _ in range(count):
        if integers[at] == INSTRUCTIONS[opcode].opcode:
            found.append(_places(opcode, at + 2))
        at += 2 + integers[at + 1]
    return found


def _places(opcode: str, at: int) -> dict[str, int]:
    named = {}
    for field in INSTRUCTIONS[opcode].fields:
        if field.kind in ("list", "part"):
            break
        named[field.name] = at
        at += _VIEW if field.kind == "view" else 1
    return named


def reads_input(integers: Sequence[int], view: int, number: int) -> bool:
    """True if a view, whose first integer has this place, is of an input."""
    return integers[view + SPACE] == ENUMS["Space"]["input"] and integers[view + INDEX] == number


def is_nothing(integers: Sequence[int], view: int) -> bool:
    """True if an instruction has no such operand."""
    return integers[view + SPACE] == ENUMS["Space"]["none"]


def view_of(integers: Sequence[int], view: int) -> Sequence[int]:
    """Returns the integers of a view."""
    return integers[view : view + _VIEW]


def set_view(
    integers: list[int], view: int, space: str, index: int, stride: int, dtype: torch.dtype = torch.int64
) -> None:
    """Writes a view from the first column of a constant or an input on."""
    integers[view : view + _VIEW] = [ENUMS["Space"][space], index, 0, stride, TYPES[dtype]]
