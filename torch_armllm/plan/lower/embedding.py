"""Looking up token embeddings, and reading given rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.node import Node

from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.graph import aten, constant
from torch_armllm.plan.add_adapters import add_embedding_adapters
from torch_armllm.plan.expression import Expression
from torch_armllm.plan.lower.call import write_call, writers
from torch_armllm.plan.lowering import Lowering, Writer
from torch_armllm.plan.program import Operand

armllm = torch.ops.armllm


def _embedding(low: Lowering, node: Node, table: Node, ids: Node, *_: Any) -> Operand:
    tensor = constant(low.module, table)
    assert tensor is not None
    vocab_size = int(tensor.shape[0])
    if tensor.dtype == torch.int64:
        return _ids_by_id(low, tensor, ids)
    weight = low.weight(table)
    out = low.new(node)
    low.emit("embed", out=out, ids=low.rows(ids), table=weight, width=out.width, vocab_size=vocab_size)
    return out


def _ids_by_id(low: Lowering, table: Tensor, ids: Node) -> Operand:
    """Replaces ids by table entries; the instruction copies each entry as two floats."""
    halves = low.program.allocate(2, torch.float32)
    low.emit(
        "embed",
        out=halves,
        ids=low.rows(ids),
        table=low.program.constant(table.view(torch.float32)),
        width=2,
        vocab_size=table.shape[0],
    )
    return Operand(halves.space, halves.index, torch.int64, (1,), 0, 1, halves.storage)


def _split_embedding(low: Lowering, call: OpCall) -> Operand:
    packed, vocab_size = low.weight(call.weight), low.held(call.rest).shape[0]
    sizes = {"width": int(call.node.meta["val"].shape[-1]), "vocab_size": vocab_size}
    return write_call(low, call, "split_embed", weight=packed, panel_stride=packed.stride, **sizes)


def _lora_embedding(low: Lowering, call: OpCall) -> Operand:
    """Adds to the rows of an embedding, in place, if nothing else reads them, or to a copy of them."""
    rows = low.rows(call.base)
    places = (place for node, place in low.locations.items() if node is not call.base)
    shared = any(isinstance(place, Operand) and place.storage is rows.storage for place in places)
    if rows.storage is None or shared or len(call.base.users) > 1:
        rows = low.compute(Expression(rows.inner, rows.dtype, operand=rows))
    factors = (low.held(each) for each in (call.a, call.b, call.ranks, call.adapters))
    add_embedding_adapters(low.program, low.rows(call.ids), rows, *factors)
    return rows


def _given_rows(low: Lowering, node: Node, ids: Node, columns: int, dtype: torch.dtype) -> Operand:
    """Reads the input that follows the tensors of the cache."""
    return Operand("input", len(low.inputs), dtype, (columns,), 0, columns)


def _token_types(low: Lowering, node: Node, ids: Node, count: int) -> Operand:
    """Reads the input that follows the tensors of the cache."""
    return Operand("input", len(low.inputs), torch.int64)


WRITERS: dict[Any, Writer] = {
    aten.embedding.default: _embedding,
    armllm.given_rows.default: _given_rows,
    armllm.token_types.default: _token_types,
    **writers(
        {
            armllm.split_embedding.default: _split_embedding,
            armllm.lora_embedding.default: _lora_embedding,
        }
    ),
}
