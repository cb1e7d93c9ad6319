"""Compressed entries: their compression, selection, and attention to them."""

from __future__ import annotations

import torch

from torch_armllm.ops.op_call import OpCall
from torch_armllm.plan.lower.call import cache_layer, layer_fields, select_writer, write_call, writers
from torch_armllm.plan.lower.recurrent import step_fields
from torch_armllm.plan.lowering import Lowering
from torch_armllm.plan.program import Operand

armllm = torch.ops.armllm


def _compress(low: Lowering, call: OpCall) -> None:
    layer, rows, cos = cache_layer(low, call.entries), low.rows(call.kv), low.rows(call.cos)
    size = int(call.weight.meta["val"].shape[0])
    write_call(
        low,
        call,
        "compress_windows",
        torch.float32,
        kv=rows,
        cos=cos,
        **step_fields(low, call),
        entries=layer.input,
        entries_layer=layer.layer,
        rate=int(call.bias.meta["val"].shape[0]),
        size=size,
        parts=rows.width // size,
        pairs=cos.width,
    )


def _attention(low: Lowering, call: OpCall) -> Operand:
    queries = low.rows(call.q)
    kept = None if call.entries is None else cache_layer(low, call.entries)
    return write_call(
        low,
        call,
        "entry_attention",
        torch.float32,
        q=queries,
        **layer_fields(low, call.cache),
        entries=0 if kept is None else kept.input,
        entries_layer=0 if kept is None else kept.layer,
        q_heads=queries.inner[-2],
        size=queries.inner[-1],
        block_size=int(call.cache.meta["val"].shape[1]),
        top_k=0 if call.selected is None else low.rows(call.selected).width,
    )


WRITERS = writers(
    {
        armllm.compress_windows.default: _compress,
        armllm.select_entries.default: select_writer("select_entries"),
        armllm.entry_attention.default: _attention,
    }
)
