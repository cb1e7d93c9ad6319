"""The program of a native plan while it is written: named instructions over rows that have no place yet.

Opcodes and fields come from the compiled library (`torch_armllm.ops.tables`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from torch_armllm.ops.tables import INSTRUCTIONS

Space = Literal["none", "arena", "constant", "input", "output", "shared"]
"""Memory of an operand."""
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


class Fields:
    """Values of fields by name, with their kinds checked."""

    fields: Mapping[str, Field]

    def operand(self, name: str) -> Operand:
        """Returns the operand in a field; raises a TypeError if it holds something else."""
        value = self.fields[name]
        if not isinstance(value, Operand):
            raise self._other(name, "operand")
        return value

    def integer(self, name: str) -> int:
        """Returns the integer in a field; raises a TypeError if it holds something else."""
        value = self.fields[name]
        if not isinstance(value, int):
            raise self._other(name, "integer")
        return value

    def real(self, name: str) -> float:
        """Returns the number in a field; raises a TypeError if it holds something else."""
        value = self.fields[name]
        if not isinstance(value, (int, float)):
            raise self._other(name, "number")
        return float(value)

    def _other(self, name: str, kind: str) -> TypeError:
        return TypeError(f"field {name!r} holds no {kind}: {self.fields[name]!r}")


@dataclass(frozen=True)
class Record(Fields):
    """An entry of an instruction's list."""

    fields: Mapping[str, Field]


@dataclass
class Instruction(Fields):
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

    def part(self, name: str) -> Instruction:
        """Returns the instruction that is a part of this one; raises a TypeError if the field is none."""
        value = self.fields[name]
        if not isinstance(value, Mapping):
            raise self._other(name, "part")
        (kind,) = (f.type for f in INSTRUCTIONS[self.opcode].fields if f.name == name)
        return Instruction(kind, value)

    def records(self, name: str) -> list[Record]:
        """Returns the entries of a list; raises a TypeError if the field holds something else."""
        value = self.fields[name]
        if not isinstance(value, list):
            raise self._other(name, "list")
        return list(map(Record, value))

    def changed(self, **fields: Field) -> Instruction:
        """Returns the instruction with other values of some fields."""
        return Instruction(self.opcode, {**self.fields, **fields})

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


@dataclass
class Program:
    """Instructions with their constants, storages and outputs; `lay_out` gives the rows their places."""

    instructions: list[Instruction] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    constants: list[Tensor] = field(default_factory=list)
    outputs: list[Storage] = field(default_factory=list)
    _numbers: dict[Any, int] = field(default_factory=dict)
    """Number of each constant, by its place in memory and its form."""

    def allocate(self, columns: int, dtype: torch.dtype, inner: tuple[int, ...] | None = None) -> Operand:
        """Allocates rows of ``columns`` elements, which the next instruction writes."""
        storage = Storage(columns, dtype, first=len(self.instructions), last=len(self.instructions))
        self.storages.append(storage)
        inner = (columns,) if inner is None else inner
        return Operand("arena", len(self.storages) - 1, dtype, inner, 0, columns, storage)

    def constant(self, tensor: Tensor) -> Operand:
        """Returns an operand for a constant tensor; its rows are those of the second-to-last dimension.

        A tensor that several instructions read, as in layers that run several times, is one constant.
        """
        place = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        number = self._numbers.setdefault(place, len(self.constants))
        if number == len(self.constants):
            self.constants.append(tensor)
        stride = int(tensor.stride(-2)) if tensor.dim() >= 2 else int(tensor.numel())
        return Operand("constant", number, tensor.dtype, tuple(tensor.shape[1:]), 0, stride)

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
