"""The program of a native plan: instructions, the arena's layout, and the integers that C++ reads.

The order of opcodes and fields is that of ``ops/plan/instructions.cpp``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor


class Opcode(IntEnum):
    """What an instruction does."""

    EMBED = 0
    RMS_NORM = 1
    LAYER_NORM = 2
    LINEAR = 3
    GATED_LINEAR = 4
    DENSE_LINEAR = 5
    MOE = 6
    ROUTE = 7
    ROPE_TABLE = 8
    ROPE = 9
    KV_WRITE = 10
    ATTENTION = 11
    GATED_ACT = 12
    ADD = 13
    SPLIT_EMBED = 14
    NORM_LINEAR = 15
    NORM_GATED_LINEAR = 16
    INT8_HEADS = 17
    DENSE_HEADS = 18
    MLA_WRITE = 19
    MLA_ATTENTION = 20
    REORDER = 21
    BEST_TOKENS = 22


class Space(IntEnum):
    """Where an operand lies."""

    NONE = 0
    ARENA = 1
    CONSTANT = 2
    INPUT = 3
    OUTPUT = 4


ACTIVATIONS = {
    "none": 0,
    "silu": 1,
    "gelu": 2,
    "gelu_tanh": 3,
    "relu": 4,
    "swiglu_clamped": 5,
    "silu_clamped": 6,
}
SCORINGS = {"softmax": 0, "sigmoid": 1, "topk_softmax": 2}
TYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.int64: 3,
    torch.int32: 4,
    torch.int8: 0,
    torch.uint8: 0,  # packed weights: bytes, addressed from their start
}
_LINE = 64  # bytes; rows of the arena begin on cache lines


@dataclass
class Storage:
    """Rows of tokens that one instruction makes and later ones read, as long as ``first`` to ``last``."""

    columns: int
    dtype: torch.dtype
    first: int = 0
    last: int = 0
    offset: int = 0
    is_output: bool = False

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one row, padded to whole cache lines."""
        size = self.columns * self.dtype.itemsize
        return (size + _LINE - 1) // _LINE * _LINE


@dataclass(frozen=True)
class Operand:
    """A view of rows: ``inner`` elements a token from ``column`` on, rows ``stride`` elements apart.

    Heads may lie ``apart`` further than they are wide; 0: they lie side by side.
    """

    space: Space
    index: int
    dtype: torch.dtype
    inner: tuple[int, ...] = ()
    column: int = 0
    stride: int = 0
    storage: Storage | None = field(default=None, compare=False)
    apart: int = 0

    @property
    def head_stride(self) -> int:
        """Elements from one head to the next."""
        return self.apart or self.inner[-1]

    @property
    def width(self) -> int:
        """Elements a token."""
        size = 1
        for n in self.inner:
            size *= n
        return size


NOTHING = Operand(Space.NONE, 0, torch.float32)

Field = Operand | int | float


@dataclass
class Instruction:
    """An opcode and its fields, in the order that C++ reads them."""

    opcode: Opcode
    fields: Sequence[Field]


def _layout(storages: list[Storage]) -> int:
    """Gives every storage its offset so that those alive together do not overlap; returns bytes a token."""
    placed: list[Storage] = []
    total = 0
    for storage in sorted((s for s in storages if not s.is_output), key=lambda s: s.first):
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
    """What a native plan is made from."""

    constants: list[Tensor]
    integers: list[int]
    floats: list[float]
    opcodes: list[str]
    """names of the instructions, for profiles"""
    columns: int
    """of the result"""
    dtype: torch.dtype
    """of the result"""


@dataclass
class Program:
    """Instructions with their constants, ready to be made a native plan."""

    instructions: list[Instruction] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    constants: list[Tensor] = field(default_factory=list)
    outputs: list[Storage] = field(default_factory=list)

    def allocate(self, columns: int, dtype: torch.dtype, inner: tuple[int, ...] | None = None) -> Operand:
        """New rows of ``columns`` elements, made by the next instruction."""
        storage = Storage(columns, dtype, first=len(self.instructions), last=len(self.instructions))
        self.storages.append(storage)
        inner = (columns,) if inner is None else inner
        return Operand(Space.ARENA, len(self.storages) - 1, dtype, inner, 0, columns, storage)

    def constant(self, tensor: Tensor) -> Operand:
        """An operand for a constant tensor; its rows are those of its last dimension but one."""
        self.constants.append(tensor)
        stride = int(tensor.stride(-2)) if tensor.dim() >= 2 else int(tensor.numel())
        return Operand(
            Space.CONSTANT, len(self.constants) - 1, tensor.dtype, tuple(tensor.shape[1:]), 0, stride
        )

    def emit(self, opcode: Opcode, *fields: Field) -> None:
        """Appends an instruction and keeps its operands' storages alive up to it."""
        for f in fields:
            if isinstance(f, Operand) and f.storage is not None:
                f.storage.last = len(self.instructions)
        self.instructions.append(Instruction(opcode, fields))

    def encode(self) -> Encoded:
        """What the native plan is made from."""
        for number, storage in enumerate(self.outputs):
            storage.is_output, storage.offset = True, number
        integers = [_layout(self.storages), len(self.outputs)]
        for storage in self.outputs:
            integers += [storage.columns, TYPES[storage.dtype]]
        integers.append(len(self.instructions))
        floats: list[float] = []
        for instruction in self.instructions:
            body: list[int] = []
            for f in instruction.fields:
                if isinstance(f, Operand):
                    body += self._operand(f)
                elif isinstance(f, float):
                    body.append(len(floats))
                    floats.append(f)
                else:
                    body.append(int(f))
            integers += [int(instruction.opcode), len(body), *body]
        opcodes = [instruction.opcode.name.lower() for instruction in self.instructions]
        last = self.outputs[0]
        return Encoded(self.constants, integers, floats, opcodes, last.columns, last.dtype)

    @staticmethod
    def _operand(operand: Operand) -> list[int]:
        space, index = operand.space, operand.index
        if operand.storage is not None:
            space = Space.OUTPUT if operand.storage.is_output else Space.ARENA
            index = operand.storage.offset
        return [int(space), index, operand.column, operand.stride, TYPES[operand.dtype]]
