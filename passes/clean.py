"""Removal of nodes without effect: assertions, same-dtype conversions, inactive dropout, dead code."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import (
    CONVERSIONS,
    aten,
    call,
    is_op,
    is_private,
    is_weight,
    is_written,
    match,
    other_operand,
    value,
    writes_to,
)


def _same_size(before: torch.Tensor, after: torch.Tensor) -> bool:
    """True if two shapes are equal for any number of tokens."""
    pairs = zip(before.shape, after.shape, strict=True)
    return all(statically_known_true(a == b) for a, b in pairs)


def _is_identity(node: fx.Node) -> bool:
    if is_op(node, *CONVERSIONS, *_COPIES):
        before, after = value(OpCall(node).self), value(node)
        if is_op(node, aten.contiguous, aten.clone) and not before.is_contiguous():
            return False
        if is_op(node, aten.clone) and is_written(node):
            return False
        return bool(before.dtype == after.dtype and before.device == after.device)
    if is_op(node, aten.repeat):
        return all(isinstance(n, int) and n == 1 for n in OpCall(node).repeats) and _same_dims(node)
    if is_op(node, aten.expand_as, aten.expand):
        return all(
            is_op(user, aten.add.Tensor, aten.mul.Tensor) and _broadcasts(user, node) for user in node.users
        )
    if is_op(node, aten.dropout):
        return bool(OpCall(node).train is False or OpCall(node).p == 0)
    if is_op(node, aten.mul.Tensor):
        one = OpCall(node).other
        return isinstance(one, float) and one == 1.0 and value(node).dtype.is_floating_point
    if match(node, aten.slice.Tensor, step=1) or is_op(node, aten.expand.default):
        before, after = value(OpCall(node).self), value(node)
        return before.dim() == after.dim() and _same_size(before, after)
    return False


def _as_transpose(node: fx.Node) -> None:
    """Makes a permutation that swaps two dimensions a transposition, which other passes look for."""
    order = [int(d) % value(node).dim() for d in OpCall(node).dims]
    moved = [d for d, source in enumerate(order) if d != source]
    if len(moved) == 2:
        node.target, node.args = aten.transpose.int, (OpCall(node).self, *moved)


_COPIES = (
    aten.contiguous,
    aten.clone,
    aten.detach,
    aten.detach_,
    aten.alias,
    aten.lift_fresh_copy,
)

_IN_PLACE = {
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.add_.Tensor: aten.add.Tensor,
    aten.sub_.Tensor: aten.sub.Tensor,
    aten.div_.Tensor: aten.div.Tensor,
}
_SAME = {aten.multiply.Tensor: aten.mul.Tensor, aten.multiply.Scalar: aten.mul.Tensor}
"""Operators under two names."""


def _broadcasts(user: fx.Node, expanded: fx.Node) -> bool:
    """True if the other operand of an operator has the shape to which this one was expanded."""
    other = other_operand(user, expanded)
    if not isinstance(other, fx.Node) or other is expanded or value(other).dim() != value(expanded).dim():
        return False
    return _same_size(value(other), value(expanded))


def _as_embedding(node: fx.Node) -> None:
    """Makes a selection of a constant's rows by flattened ids a look-up of ids."""
    table, dim, ids = OpCall(node).self, OpCall(node).dim, OpCall(node).index
    while is_op(ids, aten.view, aten.reshape):
        ids = OpCall(ids).self
    if dim != 0 or not is_weight(table) or not isinstance(ids, fx.Node) or value(table).dim() != 2:
        return
    if value(ids).dim() != 2 or value(ids).shape[0] != 1:
        return
    with node.graph.inserting_before(node):
        rows = call(node.graph, aten.embedding.default, table, ids)
        node.replace_all_uses_with(call(node.graph, aten.select.int, rows, 0, 0))
    node.graph.erase_node(node)


def _same_dims(node: fx.Node) -> bool:
    return value(OpCall(node).self).dim() == value(node).dim()


def _out_of_place(node: fx.Node) -> None:
    """Makes an in-place op out of place if no other node reads the changed tensor."""
    changed, other = OpCall(node).self, OpCall(node).other
    other = value(other) if isinstance(other, fx.Node) else other
    assert isinstance(changed, fx.Node)
    promoted = torch.result_type(value(changed), other)  # type: ignore[arg-type]
    if promoted == value(changed).dtype and is_private(changed):
        node.target = _IN_PLACE[node.target]  # type: ignore[index]


def _is_transposed_weight(node: Any) -> bool:
    """True for ``weight.T`` of a matrix: a product with it is a linear layer."""
    if not is_op(node, aten.t, aten.numpy_T, aten.transpose.int, aten.permute):
        return False
    source, *dims = node.args
    turned = {d % 2 for d in dims} == {0, 1} if is_op(node, aten.transpose.int) else dims in ([], [[1, 0]])
    return is_weight(source) and value(source).dim() == 2 and turned


def _broadcast_of_one_size(node: fx.Node) -> fx.Node | None:
    """Returns the tensor that a result of ``broadcast_tensors`` equals; None if it is repeated."""
    part = match(node, operator.getitem)
    source = None if part is None else match(part.source, aten.broadcast_tensors)
    if part is None or source is None:
        return None
    tensor: fx.Node = source.tensors[part.index]
    before, after = value(tensor), value(node)
    return tensor if before.dim() == after.dim() and _same_size(before, after) else None


def _only_part(node: fx.Node) -> fx.Node | None:
    """Returns the only part of a concatenation that is no new, empty tensor; None if there are several."""
    parts = OpCall(node).tensors
    kept = [part for part in parts if not (is_op(part, aten.new_zeros) and 0 in OpCall(part).size)]
    return kept[0] if len(kept) == 1 < len(parts) else None


def _drop_dead_writes(graph: fx.Graph) -> None:
    """Removes dead code, with writes to new tensors that nothing else reads."""
    graph.eliminate_dead_code()
    dead: list[fx.Node] = [
        node
        for node in graph.nodes
        if not node.users and getattr(node.target, "namespace", "") == "aten" and _writes_privately(node)
    ]
    for node in dead:
        graph.erase_node(node)
    if dead:
        _drop_dead_writes(graph)


def _writes_privately(node: fx.Node) -> bool:
    changed = OpCall(node).first
    return isinstance(changed, fx.Node) and writes_to(node, changed) and is_private(changed)


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Removes identities and dead code."""
    graph = module.graph
    before = len(graph.nodes)
    for node in graph.nodes:  # first: the copies that they change are no identities
        if node.target in _IN_PLACE:
            _out_of_place(node)
    for node in list(graph.nodes):
        if is_op(node, aten._assert_tensor_metadata, aten._assert_scalar, aten.sym_constrain_range_for_size):
            graph.erase_node(node)
            continue
        if is_op(node, aten.permute):
            _as_transpose(node)
        if is_op(node, aten.index_select):
            _as_embedding(node)
            continue
        if is_op(node, aten.type_as):  # only the dtype of the other tensor matters
            node.target, node.args = aten.to.dtype, (OpCall(node).self, value(node).dtype)
        node.target = _SAME.get(node.target, node.target)  # type: ignore[call-overload]
        if is_op(node, aten.matmul.default) and _is_transposed_weight(OpCall(node).other):
            product = OpCall(node)
            node.target, node.args = aten.linear.default, (product.self, OpCall(product.other).first)
        same = _broadcast_of_one_size(node)
        if is_op(node, aten.cat.default, aten.concat.default):
            same = _only_part(node)
        if same is not None:
            node.replace_all_uses_with(same)
        if _is_identity(node):
            node.replace_all_uses_with(OpCall(node).first)
            graph.erase_node(node)
    _drop_dead_writes(graph)
    return before - len(graph.nodes)
