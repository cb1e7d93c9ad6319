"""Indexing of constant tables and by constant indices becomes an embedding, a slice or a constant."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import (
    aten,
    call,
    constant,
    is_op,
    match,
    new_constant,
    replace_nodes,
    strip,
    value,
)

MAX_VALUES = 1 << 26
"""Elements of a table that is looked up by another table's entries."""


def _looked_up_rows(module: fx.GraphModule, node: Node) -> Node | None:
    """``table[ids]`` of a constant table is an embedding."""
    source, indices = OpCall(node).self, OpCall(node).indices
    table = constant(module, source)
    if table is None or table.dim() != 2 or not table.is_floating_point() or len(indices) != 1:
        return None
    ids = indices[0]
    if not isinstance(ids, Node) or value(ids).dtype != torch.int64 or constant(module, ids) is not None:
        return None
    return call(module.graph, aten.embedding.default, source, ids)


def _adjacent_entries(module: fx.GraphModule, node: Node) -> Node | None:
    """``x[..., [3, 4, 5], :]`` is a slice."""
    source, indices = OpCall(node).self, OpCall(node).indices
    given = [d for d, index in enumerate(indices) if index is not None]
    entries = constant(module, indices[given[0]]) if len(given) == 1 else None
    if entries is None or entries.dtype != torch.int64 or entries.dim() != 1 or entries.numel() == 0:
        return None
    size = value(source).shape[given[0]]
    if not isinstance(size, int):
        return None
    first = int(entries[0]) % size
    if not torch.equal(entries % size, torch.arange(first, first + entries.numel())):
        return None
    return call(module.graph, aten.slice.Tensor, source, given[0], first, first + entries.numel())


def _by_another_table(module: fx.GraphModule, node: Node) -> Node | None:
    """``table[numbers[ids]]`` is ``(table[numbers])[ids]``, a single embedding."""
    table = constant(module, OpCall(node).weight)
    gathered = match(strip(OpCall(node).indices, aten.expand.default), aten.gather.default)
    if table is None or gathered is None or gathered.dim not in (1, -1):
        return None
    numbers, ids = constant(module, gathered.self), gathered.index
    if numbers is None or numbers.dim() != 2 or numbers.shape[0] != 1:
        return None
    same = value(ids).shape == value(OpCall(node).indices).shape
    if not same or numbers.numel() * table.shape[1] > MAX_VALUES:
        return None
    rows = new_constant(module, node, "rows_by_id", table[numbers[0]])
    return call(module.graph, aten.embedding.default, rows, ids)


def _by_shifted_ids(module: fx.GraphModule, node: Node) -> Node | None:
    """``table[ids + 2]`` is ``table[2:][ids]``, also if the ids were reshaped on the way."""
    look_up = OpCall(node)
    table, (ids, offset) = constant(module, look_up.weight), _unshifted(look_up.indices)
    if table is None or offset is None or not 0 <= offset < len(table):
        return None
    shape = value(look_up.indices).shape
    if value(ids).shape == (1, *shape):
        ids = call(module.graph, aten.select.int, ids, 0, 0)
    if value(ids).shape != shape:
        return None
    rows = new_constant(module, node, "rows_by_position", table[offset:]) if offset else look_up.weight
    return call(module.graph, aten.embedding.default, rows, ids)


def _unshifted(ids: Any) -> tuple[Any, int | None]:
    """Returns ids before they were shifted or reshaped, and what was added; None if nothing was."""
    offset = None
    while is_op(ids, aten.add.Tensor, aten.sub.Tensor, aten.view, aten.unsqueeze, aten.squeeze, aten.select):
        step = OpCall(ids)
        if is_op(ids, aten.add.Tensor, aten.sub.Tensor):
            if not isinstance(step.other, int) or step.alpha != 1:
                break
            offset = (offset or 0) + (step.other if is_op(ids, aten.add.Tensor) else -step.other)
        elif is_op(ids, aten.select) and value(step.self).shape[step.dim] != 1:
            break
        ids = step.self
    return ids, offset


def _same_row(module: fx.GraphModule, node: Node) -> Node | None:
    """The embedding of the same id for all tokens is a row of the table, repeated."""
    table, ids = constant(module, OpCall(node).weight), OpCall(node).indices
    same = _same_id(module, ids)
    if table is None or same is None or value(ids).dim() != 2:
        return None
    number, tokens = same
    row = new_constant(module, node, "same_row", table[number].clone()[None, None])
    sizes = [value(ids).shape[0], tokens, table.shape[1]]
    return call(module.graph, aten.expand.default, row, sizes)


def _same_id(module: fx.GraphModule, ids: Any) -> tuple[int, Any] | None:
    """Returns the id that all tokens have, and the number of tokens; None if their ids may differ."""
    if is_op(ids, aten.zeros.default, aten.ones.default):
        return int(is_op(ids, aten.ones.default)), OpCall(ids).size[1]
    first = match(strip(ids, aten.expand.default), aten.slice.Tensor)  # the first of a constant row
    if first is None or first.dim not in (1, -1):
        return None
    row = constant(module, first.self)
    if row is None or row.dim() != 2 or row.numel() == 0 or not bool((row == row[0, 0]).all()):
        return None
    return int(row[0, 0]), first.end


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Rewrites indexing whose table or indices are constants."""

    def found(node: Node) -> Node | None:
        rewrites: tuple[Any, ...] = ()
        if is_op(node, aten.index.Tensor):
            rewrites = (_looked_up_rows, _adjacent_entries)
        elif is_op(node, aten.embedding.default):
            rewrites = (_by_another_table, _same_row, _by_shifted_ids)
        return next((new for rewrite in rewrites if (new := rewrite(module, node)) is not None), None)

    return replace_nodes(module.graph, found)
