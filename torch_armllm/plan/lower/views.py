"""Views and slices of rows: they need no instruction, only another operand."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

from torch.fx.node import Node

from torch_armllm.passes.lib.graph import aten
from torch_armllm.plan.lowering import Lowering, Unlowerable, Writer
from torch_armllm.plan.program import NOTHING, Operand


def _view(low: Lowering, node: Node, source: Any, *_: Any) -> Operand:
    return low.same_rows(node, source)


def _select(low: Lowering, node: Node, source: Any, dim: int, index: int) -> Any:
    layer = low.cache_layer(source, index) if dim == 0 else None
    if layer is not None:
        return layer
    val = source.meta["val"]
    rows = low.heads(source)
    if len(rows.inner) == 2 and low.inner_dim(val, dim) == 0:  # one of each token's heads
        column = rows.column + index % rows.inner[0] * rows.head_stride
        return Operand(rows.space, rows.index, rows.dtype, rows.inner[1:], column, rows.stride, rows.storage)
    if dim != 0 or index != 0 or val.shape[0] != 1:
        raise Unlowerable(f"{node} selects along dimension {dim}")
    return low.same_rows(node, source)


def _slice(
    low: Lowering, node: Node, source: Any, dim: int = 0, begin: Any = 0, end: Any = None, step: int = 1
) -> Operand:
    if node.meta["val"].numel() == 0:
        return NOTHING
    rows = low.heads(source)
    last = low.inner_dim(source.meta["val"], dim) == len(rows.inner) - 1
    if not last or len(rows.inner) > 2 or step != 1:
        raise Unlowerable(f"{node} slices along dimension {dim}")
    begin = int(begin or 0)
    begin = begin + rows.inner[-1] if begin < 0 else begin
    return _columns(rows, begin, low.inner_sizes(node.meta["val"]))


def _columns(rows: Operand, begin: int, inner: tuple[int, ...]) -> Operand:
    """Returns adjacent columns of each head."""
    many = len(inner) == 2 and inner[0] > 1
    strided_heads = rows.strided_heads if inner == rows.inner else rows.head_stride if many else 0
    column = rows.column + begin
    return Operand(
        rows.space, rows.index, rows.dtype, inner, column, rows.stride, rows.storage, strided_heads
    )


def _getitem(low: Lowering, node: Node, source: Node, index: int) -> Any:
    return low.locations[source][index]


def _split(low: Lowering, node: Node, source: Any, *_: Any) -> tuple[Operand, ...]:
    """Splits a token's last dimension into adjacent parts."""
    rows = low.heads(source)
    parts = [low.inner_sizes(part) for part in node.meta["val"]]
    if any(inner[:-1] != rows.inner[:-1] for inner in parts) or len(rows.inner) > 2:
        raise Unlowerable(f"{node} splits another dimension than the last")
    operands, begin = [], 0
    for inner in parts:
        operands.append(_columns(rows, begin, inner))
        begin += inner[-1]
    return tuple(operands)


def _transpose(low: Lowering, node: Node, source: Any, *_: Any) -> Operand:
    """Moves the token dimension, which rows do not have."""
    rows = low.heads(source)
    if low.inner_sizes(node.meta["val"]) != rows.inner or _order(low, node, source) != sorted(
        _order(low, node, source)
    ):
        raise Unlowerable(f"{node} swaps two dimensions of a token")
    return rows


def _order(low: Lowering, node: Node, source: Any) -> list[int]:
    """Returns the position that each of a token's dimensions has after a transposition."""
    val = source.meta["val"]
    first, second = (int(dim) % val.dim() for dim in node.args[1:3])  # type: ignore[arg-type]
    swapped = {first: second, second: first}
    inner = [d for d in range(val.dim()) if low.inner_dim(val, d) is not None]
    return [swapped.get(d, d) for d in inner]


def _cat(low: Lowering, node: Node, parts: Any, dim: int = 0) -> Operand:
    """Joins columns: each part is computed, or copied, into its place."""
    out = low.new(node)
    if low.inner_dim(node.meta["val"], dim) != len(out.inner) - 1 or len(out.inner) > 2:
        raise Unlowerable(f"{node} joins another dimension than the last")
    column = 0
    for part in parts:
        value = low.expression(part)
        inner = (*out.inner[:-1], value.inner[-1])
        low.compute(replace(value, inner=inner, dtype=out.dtype), _columns(out, column, inner))
        column += inner[-1]
    return out


_VIEWS = (
    aten.view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.contiguous.default,
)

WRITERS: dict[Any, Writer] = {
    **dict.fromkeys(_VIEWS, _view),
    aten.select.int: _select,
    aten.transpose.int: _transpose,
    aten.cat.default: _cat,
    aten.concatenate.default: _cat,
    aten.slice.Tensor: _slice,
    aten.chunk.default: _split,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    operator.getitem: _getitem,
}
