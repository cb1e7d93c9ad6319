"""The instructions that add adapters to the rows of a layer's result, in place."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.plan.program import Field, Operand, Program


def add_adapters(
    program: Program, x: Operand, out: Operand, a: Tensor, b: Tensor, ranks: Tensor, adapters: Tensor
) -> None:
    """Writes the instruction that adds adapters to a linear layer's result; see `lora_linear` for factors.

    Args:
        program: to write to.
        x: rows of the layer's input.
        out: rows of its result, which nothing else reads.
        a: the first factors.
        b: the second factors.
        ranks: ranks in use.
        adapters: slot of each row.
    """
    layer: dict[str, Field] = {
        "x": x,
        "out": out,
        "a": program.constant(a),
        "b": program.constant(b),
        "ranks": program.constant(ranks),
        "in_features": x.width,
        "out_features": out.width,
    }
    program.emit(
        "lora",
        adapters=program.constant(adapters),
        slots=len(a),
        most_rank=a.shape[1],
        listed=len(adapters),
        integers=a.dtype == torch.int8,
        layers=[layer],
    )


def add_embedding_adapters(
    program: Program, ids: Operand, out: Operand, a: Tensor, b: Tensor, ranks: Tensor, adapters: Tensor
) -> None:
    """Writes the instruction that adds adapters to embeddings; see `lora_embedding` and `add_adapters`."""
    program.emit(
        "lora_embed",
        ids=ids,
        out=out,
        table=program.constant(a),
        b=program.constant(b),
        ranks=program.constant(ranks),
        adapters=program.constant(adapters),
        slots=len(a),
        most_rank=a.shape[2],
        listed=len(adapters),
        integers=b.dtype == torch.int8,
        vocab_size=a.shape[1],
        width=out.width,
    )
