"""Views and slices of rows: they need no instruction, only another operand."""

from __future__ import annotations

import operator
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
    if len(rows.inner) == 2 and dim % val.dim() == val.dim() - 2:  # one of each token's heads
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
    rows = low.rows(source)
    val = source.meta["val"]
    if dim % val.dim() != val.dim() - 1 or len(rows.inner) > 2 or step != 1:
        raise Unlowerable(f"{node} slices along dimension {dim}")
    inner = (*rows.inner[:-1], int(node.meta["val"].shape[-1]))
    strided_heads = rows.inner[-1] if len(inner) == 2 and inner[0] > 1 else 0
    column = rows.column + int(begin or 0)
    return Operand(
        rows.space, rows.index, rows.dtype, inner, column, rows.stride, rows.storage, strided_heads
    )


def _getitem(low: Lowering, node: Node, source: Node, index: int) -> Any:
    return low.locations[source][index]


def _split(low: Lowering, node: Node, source: Any, *_: Any) -> tuple[Operand, ...]:
    """Splits the last dimension into adjacent parts."""
    rows = low.rows(source)
    parts = node.meta["val"]
    val = source.meta["val"]
    if any(tuple(part.shape[:-1]) != tuple(val.shape[:-1]) for part in parts) or len(rows.inner) > 2:
        raise Unlowerable(f"{node} splits another dimension than the last")
    operands, column = [], rows.column
    for part in parts:
        inner = (*rows.inner[:-1], int(part.shape[-1]))
        strided_heads = rows.inner[-1] if len(inner) == 2 and inner[0] > 1 else 0
        operands.append(
            Operand(
                rows.space, rows.index, rows.dtype, inner, column, rows.stride, rows.storage, strided_heads
            )
        )
        column += inner[-1]
    return tuple(operands)


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
    aten.slice.Tensor: _slice,
    aten.chunk.default: _split,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    operator.getitem: _getitem,
}
