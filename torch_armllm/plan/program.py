"""The program of a native plan: instructions, the arena's layout, and the integers that C++ reads.

Opcodes, fields and enumerations come from the compiled library (`torch_armllm.ops.tables`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from torch_armllm.ops import tables
from torch_armllm.ops.tables import ENUMS, INSTRUCTIONS, RECORDS

Space = Literal["none", "arena", "constant", "input", "output", "shared"]
"""Memory of an operand."""
TYPES = {getattr(torch, name): number for name, number in ENUMS["ElementType"].items()}
TYPES |= dict.fromkeys(
    (torch.int8, torch.uint8), TYPES[torch.float32]
)  # packed: addressed by their first byte
_VIEW_INTEGERS = 5
"""Integers of an encoded operand."""
_LINE = 64
"""Bytes of a cache line; rows of the arena begin on one."""


@dataclass
class Storage:
    """Rows of tokens that one instruction writes and later ones read: alive from ``first`` to ``last``."""

    columns: int
    dtype: torch.dtype
    first: int = 0
    last: int = 0
    offset: int = 0
    is_output: bool = False
    is_shared: bool = False
    inside: tuple[Storage, int] | None = None
    """Rows of which these are some columns, and the first of these; see `share_rows`."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one row, padded to whole cache lines."""
        size = self.columns * self.dtype.itemsize
        return (size + _LINE - 1) // _LINE * _LINE


@dataclass(frozen=True)
class Operand:
    """A view of rows.

    Attributes:
        space: memory of the rows.
        index: number of the storage, constant or input.
        dtype: of the elements.
        inner: sizes of a token's elements.
        column: first element of a row.
        stride: elements from one row to the next.
        storage: rows of the arena or of an output.
        strides: elements from one entry to the next of each dimension of ``inner``; empty if the elements of
            a token are contiguous.
    """

    space: Space
    index: int
    dtype: torch.dtype
    inner: tuple[int, ...] = ()
    column: int = 0
    stride: int = 0
    storage: Storage | None = field(default=None, compare=False)
    strides: tuple[int, ...] = ()

    @property
    def steps(self) -> tuple[int, ...]:
        """Elements from one entry to the next of each dimension, also of contiguous ones."""
        return self.strides or contiguous(self.inner)

    @property
    def head_stride(self) -> int:
        """Elements from one head to the next."""
        return self.steps[-2] if len(self.inner) > 1 else self.width

    def view(self, inner: tuple[int, ...], steps: tuple[int, ...], column: int = 0) -> Operand:
        """Returns other elements of the rows, beginning ``column`` elements after this view's first."""
        dense = all(n == 1 or a == b for n, a, b in zip(inner, steps, contiguous(inner), strict=True))
        strides = () if dense else steps
        return replace(self, inner=inner, column=self.column + column, strides=strides)

    @property
    def width(self) -> int:
        """Elements per token."""
        size = 1
        for n in self.inner:
            size *= n
        return size


def contiguous(inner: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides of adjacent elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(inner):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


NOTHING = Operand("none", 0, torch.float32)

Field: TypeAlias = "Operand | int | float | str | Mapping[str, Field] | Sequence[Mapping[str, Field]]"


@dataclass
class Instruction:
    """An opcode and its fields by name.

    Raises:
        ValueError: the opcode is unknown, or fields are missing or unknown.
    """

    opcode: str
    fields: Mapping[str, Field]

    def __post_init__(self) -> None:
        if self.opcode not in INSTRUCTIONS:
            raise ValueError(f"unknown instruction {self.opcode!r}; there are: {', '.join(INSTRUCTIONS)}")
        names = [f.name for f in INSTRUCTIONS[self.opcode].fields]
        missing = [name for name in names if name not in self.fields]
        unknown = [name for name in self.fields if name not in names]
        if missing or unknown:
            raise ValueError(
                f"instruction {self.opcode!r}: missing fields {missing}, unknown fields {unknown}; "
                f"its fields are: {', '.join(names)}"
            )

    @property
    def operands(self) -> Iterator[Operand]:
        """Operands among its own fields and in its lists, without those of parts."""
        for value in self.fields.values():
            if isinstance(value, Operand):
                yield value
            elif isinstance(value, list):
                yield from (f for record in value for f in record.values() if isinstance(f, Operand))


def layout(storages: Iterable[Storage]) -> int:
    """Sets every storage's offset so that those alive together do not overlap; returns bytes per token."""
    placed: list[Storage] = []
    total = 0
    for storage in sorted(storages, key=lambda s: s.first):
        alive = sorted((p for p in placed if p.last >= storage.first), key=lambda p: p.offset)
        offset = 0
        for other in alive:
            if offset + storage.bytes_per_token <= other.offset:
                break
            offset = max(offset, other.offset + other.bytes_per_token)
        storage.offset = offset
        placed.append(storage)
        total = max(total, offset + storage.bytes_per_token)
    return total


@dataclass(frozen=True)
class Encoded:
    """Input of a native plan.

    Attributes:
        constants: tensors that instructions refer to.
        integers: the program, see ``ops/plan/plan.h``.
        floats: numbers that the program refers to.
        opcodes: names of the instructions, for profiles.
        columns: elements per token of the first output.
        dtype: of the first output.
    """

    constants: list[Tensor]
    integers: list[int]
    floats: list[float]
    opcodes: list[str]
    columns: int
    dtype: torch.dtype


def schemes_of(program: Encoded) -> set[str]:
    """Returns the schemes of all quantized weights that a program multiplies by."""
    names = {number: name for name, number in ENUMS["Scheme"].items()}
    return {names[program.integers[at]] for at, entry in _plain_fields(program) if entry.type == "Scheme"}


def without_handles(program: Encoded) -> list[int]:
    """Returns a program's integers with 0 for handles of communicators, which are a process's own."""
    integers = list(program.integers)
    for at, entry in _plain_fields(program):
        if entry.name == "communicator":
            integers[at] = 0
    return integers


def _plain_fields(program: Encoded) -> list[tuple[int, tables.Field]]:
    """Returns the fields that are one integer, with their places among the integers."""
    formats = {form.opcode: form.fields for form in INSTRUCTIONS.values()}
    found: list[tuple[int, tables.Field]] = []

    def read(fields: Sequence[tables.Field], at: int) -> int:
        """Returns the place after some fields, which begin at ``at``."""
        for entry in fields:
            if entry.kind == "view":
                at += _VIEW_INTEGERS
            elif entry.kind == "part":
                at = read(INSTRUCTIONS[entry.type].fields, at)
            elif entry.kind == "list":
                count, at = program.integers[at], at + 1
                for _ in range(count):
                    at = read(RECORDS[entry.type], at)
            else:
                found.append((at, entry))
                at += 1
        return at

    outputs = program.integers[1]
    at = 3 + 2 * outputs
    for _ in range(program.integers[at - 1]):
        read(formats[program.integers[at]], at + 2)
        at += 2 + program.integers[at + 1]
    return found


@dataclass
class Program:
    """Instructions with their constants, storages and outputs: the input of `encode`."""

    instructions: list[Instruction] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    constants: list[Tensor] = field(default_factory=list)
    outputs: list[Storage] = field(default_factory=list)

    def allocate(self, columns: int, dtype: torch.dtype, inner: tuple[int, ...] | None = None) -> Operand:
        """Allocates rows of ``columns`` elements, which the next instruction writes."""
        storage = Storage(columns, dtype, first=len(self.instructions), last=len(self.instructions))
        self.storages.append(storage)
        inner = (columns,) if inner is None else inner
        return Operand("arena", len(self.storages) - 1, dtype, inner, 0, columns, storage)

    def constant(self, tensor: Tensor) -> Operand:
        """Returns an operand for a constant tensor; its rows are those of the second-to-last dimension."""
        self.constants.append(tensor)
        stride = int(tensor.stride(-2)) if tensor.dim() >= 2 else int(tensor.numel())
        return Operand("constant", len(self.constants) - 1, tensor.dtype, tuple(tensor.shape[1:]), 0, stride)

    def emit(self, opcode: str, **fields: Field) -> None:
        """Appends an instruction and keeps its operands' storages alive up to it.

        Raises:
            ValueError: see `Instruction`.
        """
        instruction = Instruction(opcode, fields)
        for operand in instruction.operands:
            if operand.storage is not None:
                operand.storage.last = len(self.instructions)
        self.instructions.append(instruction)

    def encode(self) -> Encoded:
        """Lays out the arena and returns the input of a native plan."""
        for number, storage in enumerate(self.outputs):
            storage.is_output, storage.offset = True, number
        own = (s for s in self.storages if not (s.is_output or s.is_shared or s.inside))
        integers = [layout(own), len(self.outputs)]
        for storage in self.outputs:
            integers += [storage.columns, TYPES[storage.dtype]]
        integers.append(len(self.instructions))
        floats: list[float] = []
        for instruction in self.instructions:
            formats = INSTRUCTIONS[instruction.opcode].fields
            body = _encode_fields(instruction.opcode, formats, instruction.fields, floats)
            integers += [INSTRUCTIONS[instruction.opcode].opcode, len(body), *body]
        opcodes = [instruction.opcode for instruction in self.instructions]
        first = self.outputs[0]
        return Encoded(self.constants, integers, floats, opcodes, first.columns, first.dtype)


def _encode_fields(
    opcode: str, entries: Sequence[tables.Field], values: Mapping[str, Field], floats: list[float]
) -> list[int]:
    """Returns fields as integers, in the table's order; reals are appended to ``floats``."""
    body: list[int] = []
    for entry in entries:
        value = values[entry.name]
        if isinstance(value, Operand) and entry.kind == "view":
            body += _encode_operand(value)
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


def _encode_operand(operand: Operand) -> list[int]:
    space, index, column, stride = operand.space, operand.index, operand.column, operand.stride
    storage = operand.storage
    if storage is not None and storage.inside is not None:
        storage, first = storage.inside
        column, stride = column + first, storage.columns
    if storage is not None:
        space = "output" if storage.is_output else "shared" if storage.is_shared else "arena"
        index = storage.offset
    return [ENUMS["Space"][space], index, column, stride, TYPES[operand.dtype]]
