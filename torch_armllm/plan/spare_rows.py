"""Further rows of a plan's embedding table, for tokens whose embeddings a step is given."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from torch_armllm.plan.encoded_fields import (
    INDEX,
    is_nothing,
    places,
    reads_input,
    set_view,
    view_of,
)
from torch_armllm.plan.program import Encoded

_IDS = 0
"""Number of the input that holds token ids."""


class SpareRows:
    """The rows of an embedding table after those of the vocabulary: their ids look up what is written there.

    A step that has no such ids does no further work.

    Args:
        table: ``(vocab_size + count, width)``, a constant of a plan.
        vocab_size: rows of the vocabulary.
        scaled: True if the rows are products of the embeddings and a number of the model.
    """

    def __init__(self, table: Tensor, vocab_size: int, scaled: bool = False) -> None:
        self.table = table
        self.vocab_size = vocab_size
        self.scaled = scaled

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

    Where the program multiplies embeddings by a number, the table holds the products, as what is written to
    it is multiplied already.

    Raises:
        ValueError: the program does not look token ids up in one table of floats.
    """
    integers = list(program.integers)
    found = [fields for fields in places(program, "embed") if reads_input(integers, fields["ids"], _IDS)]
    if len(found) != 1 or "split_embed" in program.opcodes:
        raise ValueError(
            "its embeddings share the quantized weights of the output layer; leave that one as it is: "
            'quantization=Recipe("int4", head=None), or quantization=None'
        )
    (fields,) = found
    old = program.constants[integers[fields["table"] + INDEX]]
    table = torch.zeros(vocab_size + count, integers[fields["width"]], dtype=old.dtype)
    floats = list(program.floats)
    scale = _scale_after(program, fields)
    table[:vocab_size] = old[:vocab_size] if scale is None else (old[:vocab_size].float() * floats[scale])
    if scale is not None:
        floats[scale] = 1.0
    set_view(integers, fields["table"], "constant", len(program.constants), table.stride(0), table.dtype)
    integers[fields["vocab_size"]] = len(table)
    constants = [*program.constants, table]
    changed = replace(program, constants=constants, integers=integers, floats=floats)
    return changed, SpareRows(table, vocab_size, scale is not None)


def _scale_after(program: Encoded, embed: dict[str, int]) -> int | None:
    """Returns the index of the number by which the next instruction multiplies embeddings; None: by none."""
    if program.opcodes[program.opcodes.index("embed") + 1 :][:1] != ["add"]:
        return None
    integers = program.integers
    fields = places(program, "add")[0]
    alone = all(is_nothing(integers, fields[name]) for name in ("a", "row_factor"))
    same = view_of(integers, fields["b"]) == view_of(integers, embed["out"])
    return integers[fields["factor"]] if alone and same else None
