"""Rotary embeddings, the KV cache and attention."""

from __future__ import annotations

from typing import Any

import torch

from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.graph import constant
from torch_armllm.plan.lower.call import cache_fields, write_call, writers
from torch_armllm.plan.lowering import Lowering, Unlowerable
from torch_armllm.plan.program import NOTHING, Operand

armllm = torch.ops.armllm


def _rope_table(low: Lowering, call: OpCall) -> Any:
    assert call.axes is None
    if call.offset > 0:
        raise Unlowerable("rotates by positions after a token's own")
    cos, sin = (low.new(call.node, val) for val in call.node.meta["val"])
    low.emit(
        "rope_table",
        positions=low.rows(call.positions),
        inv_freq=low.weight(call.inv_freq, torch.float32),
        axes=NOTHING,
        cos=cos,
        sin=sin,
        half=cos.width,
        numbers=1,
        before=-call.offset,
        scaling=call.scaling,
    )
    return cos, sin


def _rope(low: Lowering, call: OpCall) -> None:
    queries, table = low.heads(call.q), low.rows(call.cos)
    heads, size = queries.inner[-2:]
    keys = low.heads(call.k) if call.k.meta["val"].numel() else NOTHING
    k_heads, k_head_stride = (keys.inner[-2], keys.head_stride) if keys is not NOTHING else (0, 0)
    low.emit(
        "rope",
        q=queries,
        k=keys,
        cos=table,
        sin=low.rows(call.sin),
        q_heads=heads,
        k_heads=k_heads,
        head_size=size,
        rotary=2 * table.width,
        pairs="unzipped" if call.unzip else "neighbors" if call.interleaved else "halves",
        q_head_stride=queries.head_stride,
        k_head_stride=k_head_stride,
    )


def _kv_write(low: Lowering, call: OpCall) -> None:
    keys, values, slots = low.rows(call.k), low.rows(call.v), low.rows(call.slots)
    low.emit("kv_write", k=keys, v=values, slots=slots, **cache_fields(low, call), head_size=keys.inner[-1])


def _rows_or_constant(low: Lowering, node: Any) -> Operand:
    """Returns float32 rows of tokens, a constant row that all tokens share, or nothing."""
    if node is None or constant(low.module, node) is not None:
        return low.weight(node, torch.float32)
    rows = low.rows(node)
    assert rows.dtype == torch.float32
    return rows


def _attention(low: Lowering, call: OpCall) -> Operand:
    assert call.later is None  # an input of pictures, which is added to the program
    queries = low.rows(call.q)
    q_heads, head_size = queries.inner[-2:]
    rank, extent = (0, 0) if call.profiles is None else call.profiles.meta["val"].shape
    return write_call(
        low,
        call,
        "attention",
        torch.float32,
        q=queries,
        sinks=_rows_or_constant(low, call.sinks),
        slopes=low.weight(call.alibi_slopes, torch.float32),
        relative=_rows_or_constant(low, call.relative),
        rank=rank,
        extent=extent,
        reach=0 if call.biases is None else call.biases.meta["val"].shape[1] // 2,
        **cache_fields(low, call),
        q_heads=q_heads,
        head_size=head_size,
    )


WRITERS = writers(
    {
        armllm.rope_table.default: _rope_table,
        armllm.rope_.default: _rope,
        armllm.kv_write.default: _kv_write,
        armllm.paged_attention.default: _attention,
    }
)
