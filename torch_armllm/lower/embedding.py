"""Looking up token embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import Node

from torch_armllm.lowering import Lowering, Writer
from torch_armllm.passes.match import aten, constant
from torch_armllm.program import Opcode, Operand

armllm = torch.ops.armllm


def _embedding(low: Lowering, node: Node, table: Node, ids: Node, *_: Any) -> Operand:
    weight = low.weight(table)
    out = low.new(node)
    vocabulary = constant(low.module, table).shape[0]  # type: ignore[union-attr]
    low.emit(Opcode.EMBED, out, low.rows(ids), weight, out.width, int(vocabulary))
    return out


def _split_embedding(low: Lowering, node: Node, ids: Node, table: Node, rest: Node, dtype: str) -> Operand:
    packed, further = low.weight(table), low.weight(rest)
    out = low.new(node)
    vocabulary = low.program.constants[further.index].shape[0]
    low.emit(
        Opcode.SPLIT_EMBED, out, low.rows(ids), packed, further, packed.stride, out.width, int(vocabulary)
    )
    return out


WRITERS: dict[Any, Writer] = {
    aten.embedding.default: _embedding,
    armllm.split_embedding.default: _split_embedding,
}
