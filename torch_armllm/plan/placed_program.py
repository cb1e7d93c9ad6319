"""A program whose rows have their places in memory: what a native plan runs, and what other inputs change."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from torch_armllm.ops import tables
from torch_armllm.ops.tables import ENUMS, INSTRUCTIONS, RECORDS
from torch_armllm.plan.program import Field, Instruction, Operand, Program, Space, layout

_NUMBERS: dict[torch.dtype, int] = {getattr(torch, name): n for name, n in ENUMS["ElementType"].items()}
_ELEMENTS = {number: dtype for dtype, number in _NUMBERS.items()}
_NUMBERS |= dict.fromkeys((torch.int8, torch.uint8), _NUMBERS[torch.float32])
"""Numbers of dtypes; packed weights count as float32, as they are addressed by their first byte."""
_SPACES: dict[int, Space] = {ENUMS["Space"][name]: name for name in get_args(Space)}
_VIEW = 5
"""Integers of an operand."""


class Encoded(NamedTuple):
    """The arguments of ``plan_create``: constants, the integers of ``ops/plan/plan.h``, and real numbers."""

    constants: list[Tensor]
    integers: list[int]
    floats: list[float]


class Output(NamedTuple):
    """Elements per token of an output, and their dtype."""

    columns: int
    dtype: torch.dtype


@dataclass(frozen=True)
class PlacedProgram:
    """Named instructions over places in memory, in the order in which they are computed.

    Attributes:
        instructions: their operands have no storages, and the columns and strides of memory.
        constants: tensors that instructions refer to.
        outputs: of a step, the hidden states or logits first.
        bytes_per_token: of the arena.
    """

    instructions: tuple[Instruction, ...]
    constants: list[Tensor]
    outputs: tuple[Output, ...]
    bytes_per_token: int

    @property
    def opcodes(self) -> list[str]:
        """Opcodes of the instructions."""
        return [instruction.opcode for instruction in self.instructions]

    @property
    def columns(self) -> int:
        """Elements per token of the first output."""
        return self.outputs[0].columns

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first output."""
        return self.outputs[0].dtype

    @property
    def schemes(self) -> set[str]:
        """Schemes of all quantized weights that the program multiplies by."""
        named = (value for entry, value in self._plain_fields() if entry.type == "Scheme")
        return {value for value in named if isinstance(value, str)}

    def named(self, opcode: str) -> list[Instruction]:
        """Returns the instructions with an opcode, in order."""
        return [instruction for instruction in self.instructions if instruction.opcode == opcode]

    def map(self, change: Callable[[Instruction], Instruction]) -> PlacedProgram:
        """Returns the program with each instruction changed by a function, which may return it as it is."""
        return replace(self, instructions=tuple(map(change, self.instructions)))

    def changed(self, opcode: str, **fields: Field) -> PlacedProgram:
        """Returns the program with other values of some fields in all instructions with an opcode."""
        return self.map(lambda each: each.changed(**fields) if each.opcode == opcode else each)

    def inserted(self, at: int, instruction: Instruction) -> PlacedProgram:
        """Returns the program with one more instruction, in front of that with number ``at``."""
        before, after = self.instructions[:at], self.instructions[at:]
        return replace(self, instructions=(*before, instruction, *after))

    def with_constant(self, tensor: Tensor, stride: int) -> tuple[PlacedProgram, Operand]:
        """Returns the program with one more constant, and a view of it with ``stride`` elements a row."""
        view = Operand("constant", len(self.constants), tensor.dtype, stride=stride)
        return replace(self, constants=[*self.constants, tensor]), view

    def without_handles(self) -> PlacedProgram:
        """Returns the program with 0 for handles of communicators, which are a process's own."""

        def cleared(name: str, value: Field) -> Field:
            return 0 if name == "communicator" else value

        return self.map(lambda each: Instruction(each.opcode, _mapped(each.fields, cleared)))

    def encode(self) -> Encoded:
        """Returns the arguments of ``plan_create``.

        Raises:
            TypeError: a field has a value of another kind than its format says.
        """
        integers = [self.bytes_per_token, len(self.outputs)]
        for output in self.outputs:
            integers += [output.columns, _NUMBERS[output.dtype]]
        integers.append(len(self.instructions))
        floats: list[float] = []
        for instruction in self.instructions:
            form = INSTRUCTIONS[instruction.opcode]
            body = _encode_fields(instruction.opcode, form.fields, instruction.fields, floats)
            integers += [form.opcode, len(body), *body]
        return Encoded(self.constants, integers, floats)

    def _plain_fields(self) -> Iterator[tuple[tables.Field, Field]]:
        """Yields the format and value of each field that is one value, also of those in parts and lists."""
        for instruction in self.instructions:
            yield from _plain_fields(INSTRUCTIONS[instruction.opcode].fields, instruction.fields)


def lay_out(program: Program) -> PlacedProgram:
    """Gives the rows of a program their places: those that are alive together do not overlap."""
    for number, storage in enumerate(program.outputs):
        storage.is_output, storage.offset = True, number
    own = (s for s in program.storages if not (s.is_output or s.is_shared or s.inside))
    size = layout(own)

    def placed(_: str, value: Field) -> Field:
        return _place(value) if isinstance(value, Operand) else value

    instructions = tuple(Instruction(i.opcode, _mapped(i.fields, placed)) for i in program.instructions)
    outputs = tuple(Output(storage.columns, storage.dtype) for storage in program.outputs)
    return PlacedProgram(instructions, program.constants, outputs, size)


def _mapped(fields: Mapping[str, Field], change: Callable[[str, Field], Field]) -> dict[str, Field]:
    """Returns fields with each value changed by a function of its name, also those in parts and lists."""

    def mapped(name: str, value: Field) -> Field:
        if isinstance(value, Mapping):
            return _mapped(value, change)
        if isinstance(value, list):
            return [_mapped(record, change) for record in value]
        return change(name, value)

    return {name: mapped(name, value) for name, value in fields.items()}


def _place(operand: Operand) -> Operand:
    space, index, column, stride = operand.space, operand.index, operand.column, operand.stride
    storage = operand.storage
    if storage is not None and storage.inside is not None:
        storage, first = storage.inside
        column, stride = column + first, storage.columns
    if storage is not None:
        space = "output" if storage.is_output else "shared" if storage.is_shared else "arena"
        index = storage.offset
    dtype = _ELEMENTS[_NUMBERS[operand.dtype]]
    return Operand(space, index, dtype, column=column, stride=stride)


def _plain_fields(
    entries: Sequence[tables.Field], values: Mapping[str, Field]
) -> Iterator[tuple[tables.Field, Field]]:
    for entry in entries:
        value = values[entry.name]
        if isinstance(value, Mapping):
            yield from _plain_fields(INSTRUCTIONS[entry.type].fields, value)
        elif isinstance(value, list):
            for record in value:
                yield from _plain_fields(RECORDS[entry.type], record)
        elif not isinstance(value, Operand):
            yield entry, value


def _encode_fields(
    opcode: str, entries: Sequence[tables.Field], values: Mapping[str, Field], floats: list[float]
) -> list[int]:
    """Returns fields as integers, in the table's order; reals are appended to ``floats``."""
    body: list[int] = []
    for entry in entries:
        value = values[entry.name]
        if isinstance(value, Operand) and entry.kind == "view":
            body += [ENUMS["Space"][value.space], value.index, value.column, value.stride]
            body.append(_NUMBERS[value.dtype])
        elif isinstance(value, Mapping) and entry.kind == "part":
            body += _encode_fields(entry.type, INSTRUCTIONS[entry.type].fields, value, floats)
        elif isinstance(value, list) and entry.kind == "list":
            body.append(len(value))
            for record in value:
                body += _encode_fields(opcode, RECORDS[entry.type], record, floats)
        elif isinstance(value, str) and entry.kind == "enum":
            body.append(ENUMS[entry.type][value])
        elif isinstance(value, (int, float)) and entry.kind == "real":
            body.append(len(floats))
            floats.append(float(value))
        elif isinstance(value, int) and entry.kind in ("int", "flag"):
            body.append(operator.index(value))
        else:
            raise TypeError(
                f"field {entry.name!r} of instruction {opcode!r} is not a valid {entry.kind}: {value!r}"
            )
    return body


def decode(constants: list[Tensor], integers: Sequence[int], floats: Sequence[float]) -> PlacedProgram:
    """Returns the program that `PlacedProgram.encode` wrote.

    Raises:
        ValueError: the integers are no program.
    """
    try:
        return _Reader(integers, floats).program(constants)
    except (IndexError, KeyError) as error:
        raise ValueError(f"the integers are no program: {error!r}") from error


class _Reader:
    """Reads the fields of a program's instructions from its integers."""

    def __init__(self, integers: Sequence[int], floats: Sequence[float]) -> None:
        self._integers, self._floats = integers, floats
        self._at = 0
        self._names = {kind: {n: name for name, n in names.items()} for kind, names in ENUMS.items()}

    def program(self, constants: list[Tensor]) -> PlacedProgram:
        """Reads everything."""
        opcodes = {form.opcode: name for name, form in INSTRUCTIONS.items()}
        bytes_per_token, count = self._next(), self._next()
        outputs = tuple(Output(self._next(), _ELEMENTS[self._next()]) for _ in range(count))
        placed = []
        for _ in range(self._next()):
            opcode, size = opcodes[self._next()], self._next()
            end = self._at + size
            placed.append(Instruction(opcode, self._fields(INSTRUCTIONS[opcode].fields)))
            if self._at != end:
                raise ValueError(f"instruction {opcode!r} has {size} integers, and its fields are others")
        return PlacedProgram(tuple(placed), constants, outputs, bytes_per_token)

    def _next(self) -> int:
        value = self._integers[self._at]
        self._at += 1
        return value

    def _fields(self, entries: Sequence[tables.Field]) -> dict[str, Field]:
        return {entry.name: self._value(entry) for entry in entries}

    def _value(self, entry: tables.Field) -> Field:
        if entry.kind == "view":
            space, index, column, stride, dtype = (self._next() for _ in range(_VIEW))
            return Operand(_SPACES[space], index, _ELEMENTS[dtype], column=column, stride=stride)
        if entry.kind == "part":
            return self._fields(INSTRUCTIONS[entry.type].fields)
        if entry.kind == "list":
            return [self._fields(RECORDS[entry.type]) for _ in range(self._next())]
        if entry.kind == "enum":
            return self._names[entry.type][self._next()]
        if entry.kind == "real":
            return self._floats[self._next()]
        return self._next()
