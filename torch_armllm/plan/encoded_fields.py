"""Places of instruction fields in the integers of an encoded program, for programs that are changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from torch_armllm.ops.tables import ENUMS, INSTRUCTIONS, RECORDS
from torch_armllm.plan.program import TYPES, Encoded

_VIEW = 5
"""Integers of a view."""
SPACE, INDEX = 0, 1
"""Places of a view's memory and of its number there, in the view's integers."""


@dataclass(frozen=True)
class Placed:
    """An instruction's place in the integers of a program.

    Attributes:
        opcode: its name.
        at: of its first integer.
        fields: places of its fields, by name; those of a part are ``part.field``.  Those of lists, and of
            fields after one, are left out.
    """

    opcode: str
    at: int
    fields: dict[str, int]


def instructions(program: Encoded) -> list[Placed]:
    """Returns the instructions of a program in order."""
    integers = program.integers
    at = _count_at(integers) + 1
    found = []
    for opcode in program.opcodes:
        found.append(Placed(opcode, at, _places(opcode, at + 2)))
        at += 2 + integers[at + 1]
    return found


def places(program: Encoded, opcode: str) -> list[dict[str, int]]:
    """Returns the places of the fields of each instruction with an opcode; see `Placed`."""
    return [placed.fields for placed in instructions(program) if placed.opcode == opcode]


def with_instruction(program: Encoded, opcode: str, body: Sequence[int], before: Placed) -> Encoded:
    """Returns a program with one more instruction.

    Args:
        program: to change.
        opcode: of the new instruction.
        body: its fields as integers.
        before: the instruction that follows it.
    """
    integers, opcodes = list(program.integers), list(program.opcodes)
    opcodes.insert(instructions(program).index(before), opcode)
    integers[before.at : before.at] = [INSTRUCTIONS[opcode].opcode, len(body), *body]
    integers[_count_at(integers)] += 1
    return replace(program, integers=integers, opcodes=opcodes)


def _count_at(integers: Sequence[int]) -> int:
    return 2 + 2 * integers[1]


def _places(opcode: str, at: int) -> dict[str, int]:
    named: dict[str, int] = {}
    for field in INSTRUCTIONS[opcode].fields:
        if field.kind == "list":
            break
        if field.kind == "part":
            part = _places(field.type, at)
            named |= {f"{field.name}.{name}": place for name, place in part.items()}
            at += sum(_size(entry.kind) for entry in INSTRUCTIONS[field.type].fields)
        else:
            named[field.name] = at
            at += _size(field.kind)
    return named


def records(program: Encoded, placed: Placed, name: str) -> list[dict[str, int]]:
    """Returns the places of the fields of each entry of an instruction's list."""
    at = placed.at + 2
    for field in INSTRUCTIONS[placed.opcode].fields:
        if field.kind != "list":
            at += _size(field.kind)
            continue
        size = sum(_size(entry.kind) for entry in RECORDS[field.type])
        count = program.integers[at]
        if field.name == name:
            return [_record(field.type, at + 1 + number * size) for number in range(count)]
        at += 1 + count * size
    raise KeyError(name)


def _record(kind: str, at: int) -> dict[str, int]:
    found = {}
    for entry in RECORDS[kind]:
        found[entry.name] = at
        at += _size(entry.kind)
    return found


def _size(kind: str) -> int:
    return _VIEW if kind == "view" else 1


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
    integers[view : view + _VIEW] = new_view(space, index, stride, dtype)


def new_view(space: str, index: int, stride: int, dtype: torch.dtype, column: int = 0) -> list[int]:
    """Returns the integers of a view."""
    return [ENUMS["Space"][space], index, column, stride, TYPES[dtype]]
