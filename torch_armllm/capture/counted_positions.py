"""Positions that a model counts by itself: they become the positions of the packed tokens."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from torch_armllm.capture.probing import is_op, tensor_of
from torch_armllm.ops.op_call import OpCall

_aten = torch.ops.aten


def use_position_ids(module: fx.GraphModule, first: int = 0, indices: bool = True) -> int:
    """Replaces ``arange`` over the tokens of a captured graph by ``position_ids``.

    Whether the numbers are positions and nothing else is not asked here: `mixes_tokens` finds a graph that
    still depends on the number of tokens, and the graph is compared with the model.

    Args:
        module: a captured graph of one sequence, changed in place.
        first: position of a sequence's first token.
        indices: False to leave numbers alone that are not only computed with as floats.

    Returns:
        The number of replacements.
    """
    graph = module.graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder" and n.name == "position_ids"]
    counted = [
        n
        for n in graph.nodes
        if is_op(n, _aten.arange) and _counts_tokens(n) and (indices or _becomes_float(n))
    ]
    for node in counted if placeholders else ():
        with graph.inserting_before(node):
            row = graph.call_function(_aten.select.int, (placeholders[0], 0, 0))
            row.meta["val"] = fake = tensor_of(placeholders[0])[0]
            if first:
                row = graph.call_function(_aten.sub.Tensor, (row, first))
                row.meta["val"] = fake
            if tensor_of(node).dtype != fake.dtype:
                row = graph.call_function(_aten.to.dtype, (row, tensor_of(node).dtype))
                row.meta["val"] = tensor_of(node)
        node.replace_all_uses_with(row)
        graph.erase_node(node)
    module.recompile()
    return len(counted)


def _counts_tokens(node: fx.Node) -> bool:
    """True if a node is 0, 1, 2, … for the tokens."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not isinstance(value.shape[0], torch.SymInt):
        return False
    if not value.shape[0].node.expr.is_symbol:  # for example one more than the tokens
        return False
    counted = OpCall(node)
    return all(getattr(counted, n) == usual for n, usual in (("start", 0), ("step", 1)) if n in counted.names)


def _becomes_float(node: fx.Node) -> bool:
    """True if whole numbers are only converted to floats, perhaps after an offset, as indices are not."""
    readers = [user for user in node.users if not is_op(user, _aten._assert_tensor_metadata)]
    return bool(readers) and all(
        (is_op(user, _aten.to, _aten._to_copy) and tensor_of(user).is_floating_point())
        or (
            is_op(user, _aten.add, _aten.sub) and isinstance(OpCall(user).other, int) and _becomes_float(user)
        )
        for user in readers
    )
