"""Removal of nodes without effect: assertions, same-dtype conversions, inactive dropout, dead code."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import CONVERSIONS, aten, call, is_op, is_weight, other_operand, value


def _same_size(before: torch.Tensor, after: torch.Tensor) -> bool:
    """True if two shapes are equal for any number of tokens."""
    pairs = zip(before.shape, after.shape, strict=True)
    return all(statically_known_true(a == b) for a, b in pairs)


def _is_identity(node: fx.Node) -> bool:
    if is_op(node, *CONVERSIONS, *_COPIES):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        before, after = value(source), value(node)
        if is_op(node, aten.contiguous, aten.clone) and not before.is_contiguous():
            return False
        return bool(before.dtype == after.dtype and before.device == after.device)
    if is_op(node, aten.repeat):
        return all(isinstance(n, int) and n == 1 for n in node.args[1]) and _same_dims(node)
    if is_op(node, aten.expand_as, aten.expand):
        return all(
            is_op(user, aten.add.Tensor, aten.mul.Tensor) and _broadcasts(user, node) for user in node.users
        )
    if is_op(node, aten.dropout):
        return bool(node.args[2] is False or node.args[1] == 0)
    if is_op(node, aten.mul.Tensor):
        one = node.args[1]
        return isinstance(one, float) and one == 1.0 and value(node).dtype.is_floating_point
    if is_op(node, aten.slice.Tensor, aten.expand.default) and node.args[4:] in ((), (1,)):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        before, after = value(source), value(node)
        return before.dim() == after.dim() and _same_size(before, after)
    return False


def _as_transpose(node: fx.Node) -> None:
    """Makes a permutation that swaps two dimensions a transposition, which other passes look for."""
    order = [int(d) % value(node).dim() for d in node.args[1]]  # type: ignore[union-attr,arg-type]
    moved = [d for d, source in enumerate(order) if d != source]
    if len(moved) == 2:
        node.target, node.args = aten.transpose.int, (node.args[0], *moved)


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


def _is_private(node: object) -> bool:
    """True if a tensor shares no memory with another one: it is new, or the only view of a new one."""
    while isinstance(node, fx.Node) and len(node.users) == 1 and node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        if schema is None or schema.is_mutable or len(schema.returns) != 1:
            return False
        if schema.returns[0].alias_info is None and not is_op(node, aten.reshape, aten.contiguous):
            return True
        node = node.args[0]  # of a view
    return False


def _broadcasts(user: fx.Node, expanded: fx.Node) -> bool:
    """True if the other operand of an operator has the shape to which this one was expanded."""
    other = other_operand(user, expanded)
    if not isinstance(other, fx.Node) or other is expanded or value(other).dim() != value(expanded).dim():
        return False
    return _same_size(value(other), value(expanded))


def _as_embedding(node: fx.Node) -> None:
    """Makes a selection of a constant's rows by flattened ids a look-up of ids."""
    table, dim, ids = node.args[:3]
    while is_op(ids, aten.view, aten.reshape):
        ids = ids.args[0]  # type: ignore[union-attr]
    if dim != 0 or not is_weight(table) or not isinstance(ids, fx.Node) or value(table).dim() != 2:  # type: ignore[arg-type]
        return
    if value(ids).dim() != 2 or value(ids).shape[0] != 1:
        return
    with node.graph.inserting_before(node):
        rows = call(node.graph, aten.embedding.default, table, ids)
        node.replace_all_uses_with(call(node.graph, aten.select.int, rows, 0, 0))
    node.graph.erase_node(node)


def _same_dims(node: fx.Node) -> bool:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return value(source).dim() == value(node).dim()


def _out_of_place(node: fx.Node) -> None:
    """Makes an in-place op out of place if no other node reads the changed tensor."""
    changed, other = node.args[:2]
    other = value(other) if isinstance(other, fx.Node) else other
    assert isinstance(changed, fx.Node)
    promoted = torch.result_type(value(changed), other)  # type: ignore[arg-type]
    if promoted == value(changed).dtype and _is_private(changed):
        node.target = _IN_PLACE[node.target]  # type: ignore[index]


def _is_transposed_weight(node: Any) -> bool:
    """True for ``weight.T`` of a matrix: a product with it is a linear layer."""
    if not is_op(node, aten.t, aten.numpy_T, aten.transpose.int, aten.permute):
        return False
    source, dims = node.args[0], node.args[1:]
    turned = {d % 2 for d in dims} == {0, 1} if is_op(node, aten.transpose.int) else dims in ((), ([1, 0],))
    return is_weight(source) and value(source).dim() == 2 and turned


def _broadcast_of_one_size(node: fx.Node) -> fx.Node | None:
    """Returns the tensor that a result of ``broadcast_tensors`` equals; None if it is repeated."""
    source = node.args[0] if node.target is operator.getitem else None
    if not isinstance(source, fx.Node) or not is_op(source, aten.broadcast_tensors):
        return None
    tensor: Any = source.args[0][node.args[1]]  # type: ignore[index]
    before, after = value(tensor), value(node)
    return tensor if before.dim() == after.dim() and _same_size(before, after) else None


def _only_part(node: fx.Node) -> fx.Node | None:
    """Returns the only part of a concatenation that is no new, empty tensor; None if there are several."""
    parts: Any = node.args[0]
    kept = [part for part in parts if not (is_op(part, aten.new_zeros) and 0 in part.args[1])]
    return kept[0] if len(kept) == 1 < len(parts) else None


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Removes identities and dead code.

    Returns:
        The number of removed nodes.
    """
    graph = module.graph
    before = len(graph.nodes)
    for node in list(graph.nodes):
        if is_op(node, aten._assert_tensor_metadata, aten._assert_scalar, aten.sym_constrain_range_for_size):
            graph.erase_node(node)
            continue
        if node.target in _IN_PLACE:
            _out_of_place(node)
        if is_op(node, aten.permute):
            _as_transpose(node)
        if is_op(node, aten.index_select):
            _as_embedding(node)
            continue
        if is_op(node, aten.type_as):  # only the dtype of the other tensor matters
            node.target, node.args = aten.to.dtype, (node.args[0], value(node).dtype)
        node.target = _SAME.get(node.target, node.target)  # type: ignore[call-overload]
        if is_op(node, aten.matmul.default) and _is_transposed_weight(node.args[1]):
            node.target, node.args = aten.linear.default, (node.args[0], node.args[1].args[0])
        same = _broadcast_of_one_size(node)
        if is_op(node, aten.cat.default, aten.concat.default):
            same = _only_part(node)
        if same is not None:
            node.replace_all_uses_with(same)
        if _is_identity(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()
    return before - len(graph.nodes)
