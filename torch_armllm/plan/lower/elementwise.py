"""Elementwise operators and the permutation of columns."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import Node

from torch_armllm.passes.lib.graph import aten, constant, only_user
from torch_armllm.plan.expression import Expression, apply, number
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
        raise Unlowerable("multiplies numbers of different types")
    if _is_number(low, b):
        factor = low.constant_value(b)
        out = low.new(node)
        low.emit("add", a=NOTHING, b=rows, out=out, row_factor=NOTHING, width=out.width, factor=factor)
        return out
    tensor = constant(low.module, b)
    if tensor is not None:
        if tensor.dtype != rows.dtype or rows.width % tensor.numel() or tensor.numel() != rows.inner[-1]:
            raise Unlowerable("multiplies by a constant of other sizes than a row")
        other = _constant_row(low, rows.width, tensor.flatten().repeat(rows.width // tensor.numel()))
    else:
        other = low.rows(b)
    if other.dtype != rows.dtype:
        raise Unlowerable("multiplies numbers of different types")
    out = low.new(node)
    if other.width == 1 and rows.width > 1:
        low.emit("add", a=NOTHING, b=rows, out=out, row_factor=other, width=out.width, factor=1.0)
    elif other.width == rows.width:
        low.emit("gated_act", gate=rows, up=other, out=out, width=out.width, activation="none")
    else:
        raise Unlowerable("multiplies rows of different sizes")
    return out


def _square(low: Lowering, node: Node, x: Any, power: float = 2) -> Operand:
    rows = low.rows(x)
    if power != 2:
        raise Unlowerable(f"raises to the power {power}; plans have 0.5 and 2")
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
        raise Unlowerable("adds rows of different sizes or types")
    out = low.new(node)
    low.emit("add", a=first, b=second, out=out, row_factor=NOTHING, width=out.width, factor=alpha)
    return out


def _rsub(low: Lowering, node: Node, a: Any, b: Any, alpha: float = 1) -> Expression:
    written: Expression = _scaled("subtract")(low, node, b, a, alpha)
    return written


def _index_select(low: Lowering, node: Node, source: Any, dim: int, order: Any) -> Operand:
    """Permutes the columns of rows."""
    rows, val = low.rows(source), source.meta["val"]
    if dim % val.dim() != val.dim() - 1 or len(rows.inner) != 1:
        raise Unlowerable(f"selects along dimension {dim} by a list of indices")
    if constant(low.module, order) is None or node.meta["val"].shape != val.shape or val.dtype.itemsize == 1:
        raise Unlowerable("selects columns by a list that is no permutation of them")
    out = low.new(node)
    low.emit("reorder", x=rows, permutation=low.weight(order, torch.int32), out=out, width=out.width)
    return out


def _operator(name: str) -> Writer:
    """Returns the writer of an operator that elementwise programs have under a name of their own."""

    def lower(low: Lowering, node: Node, *arguments: Any) -> Expression:
        return apply(name, node.meta["val"].dtype, *(_value(low, x) for x in arguments))

    return lower


def _value(low: Lowering, x: Any) -> Expression:
    return number(float(x)) if isinstance(x, int | float) else low.expression(x)


def _scaled(name: str) -> Writer:
    """Returns the writer of a sum or difference whose second term may have a factor."""

    def lower(low: Lowering, node: Node, a: Any, b: Any, alpha: float = 1) -> Expression:
        dtype, second = node.meta["val"].dtype, _value(low, b)
        if alpha != 1:
            second = apply("multiply", dtype, second, number(alpha))
        return apply(name, dtype, _value(low, a), second)

    return lower


def _less(low: Lowering, node: Node, a: Any, b: Any) -> Expression:
    return apply("greater", torch.bool, _value(low, b), _value(low, a))


def _not(low: Lowering, node: Node, x: Any) -> Expression:
    value = _value(low, x)
    if value.dtype != torch.bool:
        raise Unlowerable(f"inverts the bits of {value.dtype}")
    return apply("subtract", torch.bool, number(1.0), value)


def _masked_fill(low: Lowering, node: Node, x: Any, mask: Any, fill: float) -> Expression:
    return apply("select", node.meta["val"].dtype, _value(low, mask), number(fill), _value(low, x))


def _softplus(low: Lowering, node: Node, x: Any, beta: float = 1, threshold: float = 20) -> Expression:
    dtype, value = node.meta["val"].dtype, _value(low, x)
    if beta == 1:  # above its threshold torch returns x itself, which is softplus(x) up to rounding
        return apply("softplus", dtype, value)
    scaled = apply("softplus", dtype, apply("multiply", dtype, value, number(beta)))
    return apply("multiply", dtype, scaled, number(1 / beta))


def _clamp(low: Lowering, node: Node, x: Any, least: Any = None, most: Any = None) -> Expression:
    dtype, value = node.meta["val"].dtype, _value(low, x)
    if least is not None:
        value = apply("maximum", dtype, value, _value(low, least))
    return value if most is None else apply("minimum", dtype, value, _value(low, most))


def _clamp_max(low: Lowering, node: Node, x: Any, most: Any) -> Expression:
    return _clamp(low, node, x, None, most)


def _relu(low: Lowering, node: Node, x: Any) -> Expression:
    return apply("maximum", node.meta["val"].dtype, _value(low, x), number(0.0))


def _power(low: Lowering, node: Node, x: Any, power: float = 2) -> Expression:
    dtype, value = node.meta["val"].dtype, _value(low, x)
    if power == 2:
        return apply("multiply", dtype, value, value)
    if power == 0.5:
        return apply("sqrt", dtype, value)
    raise Unlowerable(f"raises to the power {power}; plans have 0.5 and 2")


def _reciprocal(low: Lowering, node: Node, x: Any) -> Expression:
    return apply("divide", node.meta["val"].dtype, number(1.0), _value(low, x))


def _reciprocal_root(low: Lowering, node: Node, x: Any) -> Expression:
    dtype = node.meta["val"].dtype
    return apply("divide", dtype, number(1.0), apply("sqrt", dtype, _value(low, x)))


def _gelu_value(low: Lowering, node: Node, x: Any, approximate: str = "none") -> Expression:
    if approximate != "none":
        raise Unlowerable(f"approximates GELU by {approximate} within a longer formula")
    return apply("gelu", node.meta["val"].dtype, _value(low, x))


def _gated_value(low: Lowering, node: Node, gate: Any, up: Any, act: str) -> Expression:
    dtype = node.meta["val"].dtype
    if act not in ("none", "silu", "gelu"):
        raise Unlowerable(f"computes {act} of heads that are apart in memory")
    value = _value(low, gate)
    return apply("multiply", dtype, value if act == "none" else apply(act, dtype, value), _value(low, up))


def _converted(low: Lowering, node: Node, x: Any, *_: Any, **__: Any) -> Any:
    """A conversion to a type of floats, of which elementwise programs compute as float32."""
    target = node.meta["val"].dtype
    location = low.locations.get(x)
    if isinstance(location, Operand) and location.dtype == target:
        return location
    value = low.expression(x)
    if not target.is_floating_point:
        raise Unlowerable(f"converts to {target}, and plans compute floats")
    return replace(value, dtype=target)


def _in_place(operator: Any) -> Writer:
    """Returns the writer of an operator that overwrites its first argument."""

    def lower(low: Lowering, node: Node, x: Any, *arguments: Any, **options: Any) -> Operand:
        place = low.place(x)
        if place.storage is None or 0 in place.steps:
            raise Unlowerable("overwrites an input of the step")
        if low.compares(place):
            raise Unlowerable("overwrites a tensor after it was compared, and before the result is used")
        value = operator(low, node, x, *arguments, **options)
        return low.compute(replace(value, dtype=place.dtype), place)

    return lower


def _copied(low: Lowering, node: Node, _: Any, source: Any, *__: Any) -> Expression:
    return _value(low, source)


def _continues(node: Node) -> bool:
    """True if an elementwise operator alone reads a node, so that one instruction can compute both."""
    user = only_user(node)
    return user is not None and user.target in WRITERS and user.target is not aten.index_select.default


def _joined(instruction: Writer, expression: Writer) -> Writer:
    """Returns a writer that extends an expression, or writes an instruction of its own if it can."""

    def lower(low: Lowering, node: Node, *arguments: Any, **options: Any) -> Any:
        pending = any(isinstance(low.locations.get(x), Expression) for x in node.all_input_nodes)
        strided = any(getattr(low.locations.get(x), "strides", ()) for x in node.all_input_nodes)
        if not pending and not strided and not _continues(node):
            with contextlib.suppress(Unlowerable):
                return instruction(low, node, *arguments, **options)
        try:
            return expression(low, node, *arguments, **options)
        except Unlowerable as reason:
            try:
                return instruction(low, node, *arguments, **options)
            except Unlowerable:
                raise reason from None

    return lower


WRITERS: dict[Any, Writer] = {
    aten.add.Tensor: _joined(_add, _scaled("add")),
    aten.add.Scalar: _scaled("add"),
    aten.sub.Tensor: _scaled("subtract"),
    aten.rsub.Scalar: _rsub,
    aten.rsub.Tensor: _rsub,
    aten.mul.Tensor: _joined(_mul, _operator("multiply")),
    aten.div.Tensor: _operator("divide"),
    aten.add_.Tensor: _in_place(_scaled("add")),
    aten.sub_.Tensor: _in_place(_scaled("subtract")),
    aten.mul_.Tensor: _in_place(_operator("multiply")),
    aten.div_.Tensor: _in_place(_operator("divide")),
    aten.copy_.default: _in_place(_copied),
    aten.neg.default: _operator("negate"),
    aten.abs.default: _operator("absolute"),
    aten.exp.default: _operator("exp"),
    aten.expm1.default: _operator("expm1"),
    aten.log.default: _operator("log"),
    aten.log1p.default: _operator("log1p"),
    aten.floor.default: _operator("floor"),
    aten.sqrt.default: _operator("sqrt"),
    aten.reciprocal.default: _reciprocal,
    aten.rsqrt.default: _reciprocal_root,
    aten.sigmoid.default: _operator("sigmoid"),
    aten.tanh.default: _operator("tanh"),
    aten.softplus.default: _softplus,
    aten.clamp.default: _clamp,
    aten.clamp.Tensor: _clamp,
    aten.clamp_min.default: _clamp,
    aten.clamp_max.default: _clamp_max,
    aten.max.other: _operator("maximum"),
    aten.min.other: _operator("minimum"),
    aten.maximum.default: _operator("maximum"),
    aten.minimum.default: _operator("minimum"),
    aten.gt.Scalar: _operator("greater"),
    aten.gt.Tensor: _operator("greater"),
    aten.lt.Scalar: _less,
    aten.lt.Tensor: _less,
    aten.bitwise_not.default: _not,
    aten.where.self: _operator("select"),
    aten.masked_fill.Scalar: _masked_fill,
    aten.to.dtype: _converted,
    aten._to_copy.default: _converted,
    aten.type_as.default: _converted,
    aten.index_select.default: _index_select,
    aten.square.default: _joined(_square, _power),
    aten.pow.Tensor_Scalar: _joined(_square, _power),
    aten.gelu.default: _joined(_unary("gelu"), _gelu_value),
    aten.silu.default: _joined(_unary("silu"), _operator("silu")),
    aten.relu.default: _joined(_unary("relu"), _relu),
    armllm.gated_act.default: _joined(_gated_act, _gated_value),
}
