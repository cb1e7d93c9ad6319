"""Latent attention, and linear layers with a weight of each head's own."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import Node

from torch_armllm.passes.lib.graph import constant
from torch_armllm.plan.lowering import Lowering, Writer
from torch_armllm.plan.program import Opcode, Operand

armllm = torch.ops.armllm


def _sizes(x: Operand, out: Operand) -> tuple[int, ...]:
    """The fields that both kinds of weights have: heads, inputs, outputs, distance of heads."""
    return (*x.inner[-2:], out.inner[-1], x.head_stride)


def _int8_heads(low: Lowering, node: Node, x: Any, weight: Any, size: int) -> Operand:
    rows, packed, out = low.heads(x), low.weight(weight), low.new(node)
    tensor = constant(low.module, weight)
    assert tensor is not None
    low.emit(Opcode.INT8_HEADS, rows, out, packed, *_sizes(rows, out), tensor.stride(0), tensor.stride(1))
    return out


def _dense_heads(low: Lowering, node: Node, x: Any, weight: Any) -> Operand:
    rows, floats, out = low.heads(x), low.weight(weight), low.new(node)
    low.emit(Opcode.DENSE_HEADS, rows, out, floats, *_sizes(rows, out))
    return out


def _write(low: Lowering, node: Node, latent: Any, k_rope: Any, cache: Any, slots: Any) -> None:
    rows, keys, layer = low.rows(latent), low.rows(k_rope), low.known[cache]
    low.emit(Opcode.MLA_WRITE, rows, keys, low.rows(slots), layer.input, layer.layer, rows.width, keys.width)


def _attention(
    low: Lowering, node: Node, q_latent: Any, q_rope: Any, cache: Any, table: Any, starts: Any, lengths: Any,
    longest: Any, scale: float,
) -> Operand:  # fmt: skip
    latents, rope, layer = low.heads(q_latent), low.heads(q_rope), low.known[cache]
    out = low.new(node)
    low.emit(
        Opcode.MLA_ATTENTION,
        *(latents, rope, out, layer.input, layer.layer),
        *(low.rows(n).index for n in (table, starts, lengths)),
        *(*latents.inner[-2:], rope.inner[-1], latents.head_stride, rope.head_stride, float(scale)),
    )
    return out


WRITERS: dict[Any, Writer] = {
    armllm.int8_heads_linear.default: _int8_heads,
    armllm.dense_heads_linear.default: _dense_heads,
    armllm.mla_write.default: _write,
    armllm.mla_attention.default: _attention,
}
