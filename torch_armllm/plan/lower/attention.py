"""Rotary embeddings, the KV cache and attention."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import Node

from torch_armllm.plan.lowering import Lowering, Writer
from torch_armllm.plan.program import NOTHING, Opcode, Operand

armllm = torch.ops.armllm


def _rope_table(low: Lowering, node: Node, positions: Any, inv_freq: Any, scaling: float = 1.0) -> Any:
    cos, sin = (low.new(node, val) for val in node.meta["val"])
    low.emit(
        Opcode.ROPE_TABLE,
        low.rows(positions),
        low.weight(inv_freq, torch.float32),
        cos,
        sin,
        cos.width,
        float(scaling),
    )
    return cos, sin


def _rope(
    low: Lowering, node: Node, q: Any, k: Any, cos: Any, sin: Any, interleaved: bool = False,
    unzip: bool = False,
) -> None:  # fmt: skip
    queries, table = low.heads(q), low.rows(cos)
    heads, size = queries.inner[-2:]
    keys = low.heads(k) if k.meta["val"].numel() else NOTHING
    layout = (keys.inner[-2], keys.head_stride) if keys is not NOTHING else (0, 0)
    low.emit(
        Opcode.ROPE,
        *(queries, keys, table, low.rows(sin), heads, layout[0], size, 2 * table.width),
        *(int(interleaved) + int(unzip), queries.head_stride, layout[1]),
    )


def _cache(low: Lowering, k: Any, v: Any, k_scales: Any, v_scales: Any) -> tuple[int, ...]:
    """The cache's fields: inputs of keys and values, layer, inputs of scales or -1."""
    keys, values = low.known[k], low.known[v]
    scales = [-1 if s is None else low.known[s].input for s in (k_scales, v_scales)]
    return (keys.input, values.input, keys.layer, *scales)


def _kv_write(
    low: Lowering, node: Node, k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any,
    k_scales: Any = None, v_scales: Any = None,
) -> None:  # fmt: skip
    keys = low.rows(k)
    cache = _cache(low, k_cache, v_cache, k_scales, v_scales)
    low.emit(Opcode.KV_WRITE, keys, low.rows(v), low.rows(slots), *cache, keys.inner[-1])


def _attention(
    low: Lowering, node: Node, q: Any, k_cache: Any, v_cache: Any, table: Any, starts: Any, lengths: Any,
        longest: Any,
    scale: float, window: int = 0, softcap: float = 0.0, sinks: Any = None,
    k_scales: Any = None, v_scales: Any = None,
) -> Operand:  # fmt: skip
    queries = low.rows(q)
    cache = _cache(low, k_cache, v_cache, k_scales, v_scales)
    out = low.new(node)
    inputs = [low.rows(n).index for n in (table, starts, lengths)]
    low.emit(
        Opcode.ATTENTION,
        *(queries, out, low.weight(sinks, torch.float32), *cache, *inputs),
        *(*queries.inner[-2:], window, float(scale), float(softcap)),
    )
    return out


WRITERS: dict[Any, Writer] = {
    armllm.rope_table.default: _rope_table,
    armllm.rope_.default: _rope,
    armllm.kv_write.default: _kv_write,
    armllm.paged_attention.default: _attention,
}
