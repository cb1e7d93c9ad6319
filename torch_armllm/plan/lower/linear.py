"""Linear layers: quantized, gated and small float ones."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import Node

from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.graph import aten, is_op
from torch_armllm.plan.add_adapters import add_adapters
from torch_armllm.plan.lowering import Lowering, Unlowerable, Writer
from torch_armllm.plan.program import NOTHING, Operand

armllm = torch.ops.armllm


def _linear(
    low: Lowering,
    node: Node,
    x: Any,
    weight: Any,
    size: int,
    scheme: str,
    bias: Any,
    residual: Any,
    digits: int,
    rotated: bool,
) -> Operand:
    rows, packed = low.rows(x), low.weight(weight)
    added = low.rows(residual) if residual is not None else NOTHING
    out = low.new(node)
    low.emit(
        "linear",
        x=rows,
        out=out,
        residual=added,
        weight=packed,
        bias=low.weight(bias),
        panel_stride=packed.stride,
        scheme=scheme,
        in_features=rows.width,
        out_features=size,
        digits=digits,
        rotated=rotated,
    )
    return out


def _int4_linear(
    low: Lowering,
    node: Node,
    x: Any,
    weight: Any,
    size: int,
    scheme: str,
    bias: Any = None,
    residual: Any = None,
    digits: int = 1,
    rotated: bool = False,
) -> Operand:
    return _linear(low, node, x, weight, size, scheme, bias, residual, digits, rotated)


def _int8_linear(
    low: Lowering,
    node: Node,
    x: Any,
    weight: Any,
    size: int,
    bias: Any = None,
    residual: Any = None,
    digits: int = 1,
    rotated: bool = False,
) -> Operand:
    return _linear(low, node, x, weight, size, "i8", bias, residual, digits, rotated)


def _gated_linear(
    low: Lowering,
    node: Node,
    x: Any,
    weight: Any,
    size: int,
    scheme: str,
    act: str,
    gate: Any = None,
    up: Any = None,
    digits: int = 1,
    rotated: bool = False,
) -> Operand:
    rows, packed = low.rows(x), low.weight(weight)
    out = low.new(node)
    low.emit(
        "gated_linear",
        x=rows,
        out=out,
        weight=packed,
        gate_bias=low.weight(gate),
        up_bias=low.weight(up),
        panel_stride=packed.stride,
        scheme=scheme,
        in_features=rows.width,
        out_features=size,
        digits=digits,
        rotated=rotated,
        activation=act,
    )
    return out


def _dense_linear(
    low: Lowering, node: Node, x: Any, weight: Any, bias: Any = None, wide: bool = False
) -> Operand:
    rows = low.rows(x)
    out = low.new(node)
    low.emit(
        "dense_linear",
        x=rows,
        out=out,
        weight=low.weight(weight),
        bias=low.weight(bias),
        in_features=rows.width,
        out_features=out.width,
    )
    return out


def _lora_linear(
    low: Lowering, node: Node, base: Node, x: Any, a: Any, b: Any, ranks: Any, adapters: Any
) -> Operand:
    """Adds to the rows of a layer's result, in place, as nothing else reads them."""
    if not _is_own(base):
        raise Unlowerable("adds an adapter to something else than a quantized layer's result")
    factors = (low.held(each) for each in (a, b, ranks, adapters))
    add_adapters(low.program, low.rows(x), low.rows(base), *factors)
    return low.same_rows(node, base)


def _is_own(base: Node) -> bool:
    """True if one node reads a quantized layer's result, or those columns of a merged layer's."""
    layer = OpCall(base).self if is_op(base, aten.slice.Tensor) else base
    layers = armllm.int4_linear.default, armllm.int8_linear.default, armllm.gather_columns.default
    return len(base.users) == 1 and any(is_op(layer, op) for op in layers)


def _gather_columns(low: Lowering, node: Node, x: Any, communicator: int, columns: Any) -> Operand:
    rows, out = low.rows(x), low.new(node)
    parts = [{"columns": int(count)} for count in columns]
    low.emit("gather_columns", x=rows, out=out, communicator=communicator, parts=parts)
    return out


WRITERS: dict[Any, Writer] = {
    armllm.int4_linear.default: _int4_linear,
    armllm.int8_linear.default: _int8_linear,
    armllm.int4_gated_linear.default: _gated_linear,
    armllm.lora_linear.default: _lora_linear,
    armllm.dense_linear.default: _dense_linear,
    armllm.gather_columns.default: _gather_columns,
}
