"""Attention to blocks of positions that indexers select."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import Node

from torch_armllm.plan.lower.attention import cache_fields, sequence_fields
from torch_armllm.plan.lowering import Lowering, Writer
from torch_armllm.plan.program import Operand

armllm = torch.ops.armllm


def _select(
    low: Lowering, node: Node, q: Any, cache: Any, table: Any, starts: Any, lengths: Any, max_seq_len: Any,
    span: int, top_k: int, nearest: int,
) -> Operand:  # fmt: skip
    queries, layer = low.heads(q), low.locations[cache]
    out = low.new(node)
    heads, head_size = queries.inner[-2:]
    low.emit(
        "select_blocks",
        q=queries,
        out=out,
        cache=layer.input,
        layer=layer.layer,
        **sequence_fields(low, table, starts, lengths),
        heads=heads,
        head_size=head_size,
        head_stride=queries.head_stride,
        span=span,
        top_k=top_k,
        nearest=nearest,
    )
    return out


def _attention(
    low: Lowering, node: Node, q: Any, k_cache: Any, v_cache: Any, chosen: Any, span: int, table: Any,
    starts: Any, lengths: Any, max_seq_len: Any, scale: float, k_scales: Any = None, v_scales: Any = None,
) -> Operand:  # fmt: skip
    queries, blocks = low.rows(q), low.rows(chosen)
    out = low.new(node)
    q_heads, head_size = queries.inner[-2:]
    choosers, top_k = blocks.inner[-2:]
    low.emit(
        "block_attention",
        q=queries,
        out=out,
        chosen=blocks,
        **cache_fields(low, k_cache, v_cache, k_scales, v_scales),
        **sequence_fields(low, table, starts, lengths),
        q_heads=q_heads,
        head_size=head_size,
        choosers=choosers,
        span=span,
        top_k=top_k,
        scale=scale,
    )
    return out


WRITERS: dict[Any, Writer] = {
    armllm.select_blocks.default: _select,
    armllm.block_attention.default: _attention,
}
