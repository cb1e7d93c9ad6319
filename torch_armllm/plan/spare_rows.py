"""Further rows of a plan's embedding table, for tokens whose embeddings a step is given."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from torch_armllm.ops.tables import ENUMS, INSTRUCTIONS
from torch_armllm.plan.program import Encoded

_IDS, _TABLE, _WIDTH, _VOCABULARY = 5, 10, 15, 16
"""Places of the fields of ``embed`` in its integers; a view takes five."""


class SpareRows:
    """The rows of an embedding table after those of the vocabulary: their ids look up what is written there.

    A step that has no such ids does no further work.

    Args:
        table: ``(vocab_size + count, width)``, a constant of a plan.
        vocab_size: rows of the vocabulary.
    """

    def __init__(self, table: Tensor, vocab_size: int) -> None:
        self.table = table
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return self.table.shape[0] - self.vocab_size

    def write(self, at: int, rows: Tensor) -> range:
        """Writes rows ``(n, width)`` from spare row ``at`` on, and returns their ids."""
        first = self.vocab_size + at
        assert at + len(rows) <= len(self)
        self.table[first : first + len(rows)] = rows
        return range(first, first + len(rows))


def with_spare_rows(program: Encoded, vocab_size: int, count: int) -> tuple[Encoded, SpareRows]:
    """Returns a program whose embedding table has ``count`` further rows.

    Raises:
        ValueError: the program does not look token ids up in one table of floats.
    """
    integers = list(program.integers)
    found = [at for name, at in _bodies(program) if name == "embed" and _reads_ids(integers, at)]
    if len(found) != 1 or "split_embed" in program.opcodes:
        raise ValueError(
            "its embeddings share the quantized weights of the output layer; leave that one as it is: "
            'quantization=Recipe("int4", head=None), or quantization=None'
        )
    (at,) = found
    old = program.constants[integers[at + _TABLE + 1]]
    table = torch.zeros(vocab_size + count, integers[at + _WIDTH], dtype=old.dtype)
    table[:vocab_size] = old[:vocab_size]
    constants = list(program.constants)
    integers[at + _TABLE + 1] = len(constants)
    integers[at + _TABLE + 2], integers[at + _TABLE + 3] = 0, table.stride(0)
    integers[at + _VOCABULARY] = len(table)
    return replace(program, constants=[*constants, table], integers=integers), SpareRows(table, vocab_size)


def _bodies(program: Encoded) -> list[tuple[str, int]]:
    """Returns the name of each instruction and the place of its first field."""
    names = {entry.opcode: name for name, entry in INSTRUCTIONS.items()}
    integers = program.integers
    at = 2 + 2 * integers[1]
    bodies = []
    count, at = integers[at], at + 1
    for _ in range(count):
        bodies.append((names[integers[at]], at + 2))
        at += 2 + integers[at + 1]
    return bodies


def _reads_ids(integers: list[int], at: int) -> bool:
    return integers[at + _IDS] == ENUMS["Space"]["input"] and integers[at + _IDS + 1] == 0
