"""Removal of nodes without effect: assertions, same-dtype conversions, inactive dropout, dead code."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import CONVERSIONS, aten, is_op, value


def _same_size(before: torch.Tensor, after: torch.Tensor) -> bool:
    """True if two shapes are equal for any number of tokens."""
    pairs = zip(before.shape, after.shape, strict=True)
    return all(statically_known_true(a == b) for a, b in pairs)


def _is_identity(node: fx.Node) -> bool:
    if is_op(node, *CONVERSIONS, aten.contiguous, aten.clone, aten.detach, aten.alias, aten.lift_fresh_copy):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        before, after = value(source), value(node)
        if is_op(node, aten.contiguous, aten.clone) and not before.is_contiguous():
            return False
        return bool(before.dtype == after.dtype and before.device == after.device)
    if is_op(node, aten.dropout):
        return bool(node.args[2] is False or node.args[1] == 0)
    if is_op(node, aten.mul.Tensor):
        one = node.args[1]
        return isinstance(one, float) and one == 1.0 and value(node).dtype.is_floating_point
    if is_op(node, aten.slice.Tensor) and node.args[4:] in ((), (1,)):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return _same_size(value(source), value(node))
    return False


def _as_transpose(node: fx.Node) -> None:
    """Makes a permutation that swaps two dimensions a transposition, which other passes look for."""
    order = [int(d) % value(node).dim() for d in node.args[1]]  # type: ignore[union-attr,arg-type]
    moved = [d for d, source in enumerate(order) if d != source]
    if len(moved) == 2:
        node.target, node.args = aten.transpose.int, (node.args[0], *moved)


_IN_PLACE = {aten.mul_.Tensor: aten.mul.Tensor, aten.add_.Tensor: aten.add.Tensor}


def _out_of_place(node: fx.Node) -> None:
    """Makes an in-place op out of place if no other node reads the changed tensor."""
    changed = node.args[0]
    assert isinstance(changed, fx.Node)
    is_private = is_op(changed, aten.add, aten.mul, aten.linear) and len(changed.users) == 1
    if is_private and value(changed).dtype == value(node).dtype:
        node.target = _IN_PLACE[node.target]  # type: ignore[index]


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
        if is_op(node, aten.type_as):  # only the dtype of the other tensor matters
            node.target, node.args = aten.to.dtype, (node.args[0], value(node).dtype)
        if _is_identity(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()
    return before - len(graph.nodes)
