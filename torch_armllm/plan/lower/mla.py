"""Latent attention, and linear layers with one weight per head."""

from __future__ import annotations

import torch

from torch_armllm.ops.op_call import OpCall
from torch_armllm.plan.lower.call import layer_fields, select_writer, write_call, writers
from torch_armllm.plan.lower.views import is_empty
from torch_armllm.plan.lowering import Lowering
from torch_armllm.plan.program import Operand

armllm = torch.ops.armllm


def _int8_heads(low: Lowering, call: OpCall) -> Operand:
    panels = low.held(call.weight)
    return _heads(low, call, "int8_heads", head_stride=panels.stride(0), panel_stride=panels.stride(1))


def _dense_heads(low: Lowering, call: OpCall) -> Operand:
    return _heads(low, call, "dense_heads")


def _heads(low: Lowering, call: OpCall, opcode: str, **strides: int) -> Operand:
    rows = low.heads(call.x)
    heads, in_features = rows.inner[-2:]
    out_features = low.inner_sizes(call.node.meta["val"])[-1]
    sizes = {"heads": heads, "in_features": in_features, "out_features": out_features}
    return write_call(low, call, opcode, x=rows, **sizes, x_head_stride=rows.head_stride, **strides)


def _write(low: Lowering, call: OpCall) -> None:
    rows, slots = low.rows(call.latent), low.rows(call.slots)
    keys, rope_size = (rows, 0) if is_empty(call.k_rope) else ((k := low.rows(call.k_rope)), k.width)
    sizes = {"rank": rows.width, "rope_size": rope_size}
    low.emit("mla_write", latent=rows, rope=keys, slots=slots, **layer_fields(low, call.cache), **sizes)


def _attention(low: Lowering, call: OpCall) -> Operand:
    latents = low.heads(call.q_latent)
    q_heads, latent_size = latents.inner[-2:]
    rope, rope_size = (latents, 0) if is_empty(call.q_rope) else ((r := low.heads(call.q_rope)), r.inner[-1])
    return write_call(
        low,
        call,
        "mla_attention",
        torch.float32,
        latent=latents,
        rope=rope,
        **layer_fields(low, call.cache),
        q_heads=q_heads,
        latent_size=latent_size,
        rope_size=rope_size,
        latent_head_stride=latents.head_stride,
        rope_head_stride=rope.head_stride,
        top_k=0 if call.selected is None else low.rows(call.selected).width,
    )


WRITERS = writers(
    {
        armllm.int8_heads_linear.default: _int8_heads,
        armllm.dense_heads_linear.default: _dense_heads,
        armllm.mla_write.default: _write,
        armllm.mla_attention.default: _attention,
        armllm.select_tokens.default: select_writer("select_tokens"),
    }
)
