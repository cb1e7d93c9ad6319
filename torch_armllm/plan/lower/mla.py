"""Latent attention, and linear layers with one weight per head."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import Node

from torch_armllm.passes.lib.graph import constant
from torch_armllm.plan.lower.attention import sequence_fields
from torch_armllm.plan.lowering import Lowering, Writer
from torch_armllm.plan.program import NOTHING, Operand

armllm = torch.ops.armllm


def _sizes(x: Operand, out: Operand) -> dict[str, int]:
    """Returns the fields that both kinds of weights share."""
    heads, in_features = x.inner[-2:]
    return {
        "heads": heads,
        "in_features": in_features,
        "out_features": out.inner[-1],
        "x_head_stride": x.head_stride,
    }


def _int8_heads(low: Lowering, node: Node, x: Any, weight: Any, size: int) -> Operand:
    rows, packed, out = low.heads(x), low.weight(weight), low.new(node)
    tensor = constant(low.module, weight)
    assert tensor is not None
    low.emit(
        "int8_heads",
        x=rows,
        out=out,
        weight=packed,
        **_sizes(rows, out),
        head_stride=tensor.stride(0),
        panel_stride=tensor.stride(1),
    )
    return out


def _dense_heads(low: Lowering, node: Node, x: Any, weight: Any) -> Operand:
    rows, floats, out = low.heads(x), low.weight(weight), low.new(node)
    low.emit("dense_heads", x=rows, out=out, weight=floats, **_sizes(rows, out))
    return out


def _write(low: Lowering, node: Node, latent: Any, k_rope: Any, cache: Any, slots: Any) -> None:
    rows, keys, layer = low.rows(latent), low.rows(k_rope), low.locations[cache]
    low.emit(
        "mla_write",
        latent=rows,
        rope=keys,
        slots=low.rows(slots),
        cache=layer.input,
        layer=layer.layer,
        rank=rows.width,
        rope_size=keys.width,
    )


def _attention(
    low: Lowering, node: Node, q_latent: Any, q_rope: Any, cache: Any, table: Any, starts: Any, lengths: Any,
    max_seq_len: Any, scale: float, sinks: Any = None, selected: Any = None, window: int = 0,
) -> Operand:  # fmt: skip
    latents, rope, layer = low.heads(q_latent), low.heads(q_rope), low.locations[cache]
    chosen = NOTHING if selected is None else low.rows(selected)
    out = low.new(node)
    q_heads, latent_size = latents.inner[-2:]
    low.emit(
        "mla_attention",
        latent=latents,
        rope=rope,
        out=out,
        sinks=low.weight(sinks, torch.float32),
        cache=layer.input,
        layer=layer.layer,
        **sequence_fields(low, table, starts, lengths),
        q_heads=q_heads,
        latent_size=latent_size,
        rope_size=rope.inner[-1],
        latent_head_stride=latents.head_stride,
        rope_head_stride=rope.head_stride,
        selected=chosen,
        top_k=0 if selected is None else chosen.width,
        window=window,
        scale=scale,
    )
    return out


def _select(
    low: Lowering, node: Node, q: Any, weights: Any, cache: Any, table: Any, starts: Any, lengths: Any,
    max_seq_len: Any, scale: float, top_k: int,
) -> Operand:  # fmt: skip
    queries, factors, layer = low.heads(q), low.rows(weights), low.locations[cache]
    out = low.new(node)
    heads, head_size = queries.inner[-2:]
    low.emit(
        "select_tokens",
        q=queries,
        weights=factors,
        out=out,
        cache=layer.input,
        layer=layer.layer,
        **sequence_fields(low, table, starts, lengths),
        heads=heads,
        head_size=head_size,
        head_stride=queries.head_stride,
        top_k=top_k,
        scale=scale,
    )
    return out


WRITERS: dict[Any, Writer] = {
    armllm.int8_heads_linear.default: _int8_heads,
    armllm.dense_heads_linear.default: _dense_heads,
    armllm.mla_write.default: _write,
    armllm.mla_attention.default: _attention,
    armllm.select_tokens.default: _select,
}
