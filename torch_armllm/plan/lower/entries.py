"""Compressed entries: their compression, selection, and attention to them."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import Node

from torch_armllm.plan.lower.attention import sequence_fields
from torch_armllm.plan.lower.recurrent import step_fields
from torch_armllm.plan.lowering import CacheLayer, Lowering, Unlowerable, Writer
from torch_armllm.plan.program import NOTHING, Operand

armllm = torch.ops.armllm


def _layer(low: Lowering, cache: Any) -> CacheLayer:
    layer = low.locations.get(cache)
    if not isinstance(layer, CacheLayer):
        raise Unlowerable("reads entries that are no layer of the cache")
    return layer


def _compress(
    low: Lowering, node: Node, kv: Any, gate: Any, bias: Any, weight: Any, cos: Any, sin: Any, state: Any,
    entries: Any, table: Any, slots: Any, starts: Any, lengths: Any, block_size: int, eps: float,
    save_slots: Any = None,
) -> None:  # fmt: skip
    layer = _layer(low, entries)
    size, rows = int(weight.meta["val"].shape[0]), low.rows(kv)
    turns = low.rows(cos), low.rows(sin)
    low.emit(
        "compress_windows",
        kv=rows,
        gate=low.rows(gate),
        bias=low.weight(bias, torch.float32),
        weight=low.weight(weight, torch.float32),
        cos=turns[0],
        sin=turns[1],
        **step_fields(low, state, slots, starts, lengths, save_slots),
        entries=layer.input,
        entries_layer=layer.layer,
        block_table=low.inputs.index(table.name),
        block_size=block_size,
        rate=int(bias.meta["val"].shape[0]),
        size=size,
        parts=rows.width // size,
        pairs=turns[0].width,
        eps=eps,
    )


def _select(
    low: Lowering, node: Node, q: Any, weights: Any, keys: Any, table: Any, starts: Any, lengths: Any,
    max_seq_len: Any, block_size: int, rate: int, scale: float, top_k: int,
) -> Operand:  # fmt: skip
    queries, factors, layer = low.heads(q), low.rows(weights), _layer(low, keys)
    out = low.new(node)
    heads, head_size = queries.inner[-2:]
    low.emit(
        "select_entries",
        q=queries,
        weights=factors,
        out=out,
        cache=layer.input,
        layer=layer.layer,
        **sequence_fields(low, table, starts, lengths),
        heads=heads,
        head_size=head_size,
        head_stride=queries.head_stride,
        block_size=block_size,
        rate=rate,
        top_k=top_k,
        scale=scale,
    )
    return out


def _attention(
    low: Lowering, node: Node, q: Any, cache: Any, entries: Any, table: Any, starts: Any, lengths: Any,
    max_seq_len: Any, scale: float, window: int, rate: int = 0, sinks: Any = None, selected: Any = None,
) -> Operand:  # fmt: skip
    queries, layer = low.rows(q), _layer(low, cache)
    kept = None if entries is None else _layer(low, entries)
    chosen = NOTHING if selected is None else low.rows(selected)
    out = low.new(node)
    low.emit(
        "entry_attention",
        q=queries,
        out=out,
        sinks=low.weight(sinks, torch.float32),
        selected=chosen,
        cache=layer.input,
        layer=layer.layer,
        entries=0 if kept is None else kept.input,
        entries_layer=0 if kept is None else kept.layer,
        **sequence_fields(low, table, starts, lengths),
        q_heads=queries.inner[-2],
        size=queries.inner[-1],
        window=window,
        block_size=int(cache.meta["val"].shape[1]),
        rate=rate,
        top_k=0 if selected is None else chosen.width,
        scale=scale,
    )
    return out


WRITERS: dict[Any, Writer] = {
    armllm.compress_windows.default: _compress,
    armllm.select_entries.default: _select,
    armllm.entry_attention.default: _attention,
}
