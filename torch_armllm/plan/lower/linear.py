"""Linear layers: quantized, gated and small float ones."""

from __future__ import annotations

import math

import torch
from torch.fx.node import Node

from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.graph import aten, is_op
from torch_armllm.plan.add_adapters import add_adapters
from torch_armllm.plan.lower.call import write_call, writers
from torch_armllm.plan.lowering import Lowering, Unlowerable
from torch_armllm.plan.program import Field, Operand

armllm = torch.ops.armllm


def _int4_linear(low: Lowering, call: OpCall) -> Operand:
    return _quantized(low, call, "linear")


def _int8_linear(low: Lowering, call: OpCall) -> Operand:
    return _quantized(low, call, "linear", scheme="i8")


def _gated_linear(low: Lowering, call: OpCall) -> Operand:
    return _quantized(low, call, "gated_linear")


def _quantized(low: Lowering, call: OpCall, opcode: str, **fields: Field) -> Operand:
    rows, packed = low.rows(call.x), low.weight(call.weight)
    sizes = {"panel_stride": packed.stride, "in_features": rows.width}
    return write_call(low, call, opcode, x=rows, weight=packed, **sizes, **fields)


def _dense_linear(low: Lowering, call: OpCall) -> Operand:
    rows, out_features = low.rows(call.x), math.prod(low.inner_sizes(call.node.meta["val"]))
    sizes = {"in_features": rows.width, "out_features": out_features}
    return write_call(low, call, "dense_linear", x=rows, **sizes)


def _lora_linear(low: Lowering, call: OpCall) -> Operand:
    """Adds to the rows of a layer's result, in place, as nothing else reads them."""
    if not _is_own(call.base):
        raise Unlowerable("adds an adapter to something else than a quantized layer's result")
    factors = (low.held(each) for each in (call.a, call.b, call.ranks, call.adapters))
    add_adapters(low.program, low.rows(call.x), low.rows(call.base), *factors)
    return low.same_rows(call.node, call.base)


def _is_own(base: Node) -> bool:
    """True if one node reads a quantized layer's result, or those columns of a merged layer's."""
    layer = OpCall(base).self if is_op(base, aten.slice.Tensor) else base
    layers = armllm.int4_linear.default, armllm.int8_linear.default, armllm.gather_columns.default
    return len(base.users) == 1 and any(is_op(layer, op) for op in layers)


def _gather_columns(low: Lowering, call: OpCall) -> Operand:
    parts = [{"columns": int(count)} for count in call.columns]
    return write_call(low, call, "gather_columns", parts=parts)


WRITERS = writers(
    {
        armllm.int4_linear.default: _int4_linear,
        armllm.int8_linear.default: _int8_linear,
        armllm.int4_gated_linear.default: _gated_linear,
        armllm.lora_linear.default: _lora_linear,
        armllm.dense_linear.default: _dense_linear,
        armllm.gather_columns.default: _gather_columns,
    }
)
