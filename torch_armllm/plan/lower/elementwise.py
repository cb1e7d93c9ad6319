"""Elementwise operators and the permutation of columns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.node import Node

from torch_armllm.passes.lib.graph import aten, constant
from torch_armllm.plan.lowering import Lowering, Unlowerable, Writer
from torch_armllm.plan.program import NOTHING, Operand

armllm = torch.ops.armllm


def _gated_act(low: Lowering, node: Node, gate: Any, up: Any, act: str) -> Operand:
    out = low.new(node)
    low.emit("gated_act", gate=low.rows(gate), up=low.rows(up), out=out, width=out.width, activation=act)
    return out


def _constant_row(low: Lowering, width: int, tensor: Tensor) -> Operand:
    """Returns a constant row that every token reads."""
    row = low.program.constant(tensor.expand(width).contiguous())
    return Operand(row.space, row.index, row.dtype, (width,), 0, 0)


def _unary(name: str) -> Writer:
    def lower(low: Lowering, node: Node, x: Any, approximate: str = "none") -> Operand:
        rows = low.rows(x)
        ones = _constant_row(low, rows.width, torch.ones((), dtype=rows.dtype))
        act = "gelu_tanh" if approximate == "tanh" else name
        out = low.new(node)
        low.emit("gated_act", gate=rows, up=ones, out=out, width=out.width, activation=act)
        return out

    return lower


def _mul(low: Lowering, node: Node, a: Any, b: Any) -> Operand:
    """Multiplies rows by rows, a constant row, a number, or one factor per token."""
    if _is_number(low, a) or (not _is_number(low, b) and _width(low, a) < _width(low, b)):
        a, b = b, a
    rows = low.rows(a)
    if rows.dtype != node.meta["val"].dtype or not rows.dtype.is_floating_point:
        raise Unlowerable(f"{node} is not a product of rows of one type")
    if _is_number(low, b):
        factor = low.constant_value(b)
        out = low.new(node)
        low.emit("add", a=NOTHING, b=rows, out=out, row_factor=NOTHING, width=out.width, factor=factor)
        return out
    tensor = constant(low.module, b)
    if tensor is not None:
        if tensor.dtype != rows.dtype or rows.width % tensor.numel() or tensor.numel() != rows.inner[-1]:
            raise Unlowerable(f"{node} is not a product with a row")
        other = _constant_row(low, rows.width, tensor.flatten().repeat(rows.width // tensor.numel()))
    else:
        other = low.rows(b)
    if other.dtype != rows.dtype:
        raise Unlowerable(f"{node} is not a product of rows of one type")
    out = low.new(node)
    if other.width == 1 and rows.width > 1:
        low.emit("add", a=NOTHING, b=rows, out=out, row_factor=other, width=out.width, factor=1.0)
    elif other.width == rows.width:
        low.emit("gated_act", gate=rows, up=other, out=out, width=out.width, activation="none")
    else:
        raise Unlowerable(f"{node} is not a product of rows")
    return out


def _square(low: Lowering, node: Node, x: Any, power: float = 2) -> Operand:
    rows = low.rows(x)
    if power != 2:
        raise Unlowerable(f"{node} raises to the power {power}")
    out = low.new(node)
    low.emit("gated_act", gate=rows, up=rows, out=out, width=out.width, activation="none")
    return out


def _is_number(low: Lowering, x: Any) -> bool:
    if isinstance(x, (int, float)):
        return True
    tensor = constant(low.module, x)
    return tensor is not None and tensor.numel() == 1


def _width(low: Lowering, x: Any) -> int:
    tensor = constant(low.module, x)
    return 0 if tensor is not None else low.rows(x).width


def _add(low: Lowering, node: Node, a: Any, b: Any, alpha: float = 1) -> Operand:
    first, second = low.rows(a), low.rows(b)
    if first.width != second.width or first.dtype != second.dtype:
        raise Unlowerable(f"{node} is not a plain addition of rows")
    out = low.new(node)
    low.emit("add", a=first, b=second, out=out, row_factor=NOTHING, width=out.width, factor=alpha)
    return out


def _index_select(low: Lowering, node: Node, source: Any, dim: int, order: Any) -> Operand:
    """Permutes the columns of rows."""
    rows, val = low.rows(source), source.meta["val"]
    if dim % val.dim() != val.dim() - 1 or len(rows.inner) != 1:
        raise Unlowerable(f"{node} selects along dimension {dim}")
    if constant(low.module, order) is None or node.meta["val"].shape != val.shape or val.dtype.itemsize == 1:
        raise Unlowerable(f"{node} is not a permutation of columns")
    out = low.new(node)
    low.emit("reorder", x=rows, permutation=low.weight(order, torch.int32), out=out, width=out.width)
    return out


WRITERS: dict[Any, Writer] = {
    aten.add.Tensor: _add,
    aten.mul.Tensor: _mul,
    aten.index_select.default: _index_select,
    aten.square.default: _square,
    aten.pow.Tensor_Scalar: _square,
    aten.gelu.default: _unary("gelu"),
    aten.silu.default: _unary("silu"),
    aten.relu.default: _unary("relu"),
    armllm.gated_act.default: _gated_act,
}
