"""Rows that a constant mask picks, as of adapters of one language: all of them, or none."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import aten, constant, is_op, value


def _picks(module: fx.GraphModule, indices: Any) -> bool | None:
    """Returns whether a mask of one row picks it; None for any other index."""
    mask = constant(module, indices[0]) if len(indices) == 1 else None
    if mask is None or mask.dtype != torch.bool or mask.shape != (1,):
        return None
    return bool(mask)


def _update_shapes(changed: Node) -> None:
    """Computes the fake results of the nodes behind one whose result has another shape now."""
    mode = value(changed).fake_mode  # type: ignore[attr-defined]
    pending = {changed}
    node = changed
    while pending and node.op != "output":
        node = node.next
        if pending.isdisjoint(node.all_input_nodes) or node.op != "call_function":
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with mode, torch.no_grad():
            node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
        pending.add(node)


def _replaces_all(node: Node) -> bool:
    """True if a write overwrites a tensor that nothing else reads, without adding to it."""
    write = OpCall(node)
    alone = not write.accumulate and len(write.self.users) == 1
    return alone and value(write.values).shape == value(node).shape


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Replaces ``x[mask]`` by x, and ``y[mask] = z`` by z or y, as a constant mask of one row says."""
    graph = module.graph
    num_rewritten = 0
    for node in list(graph.nodes):
        if not is_op(node, aten.index.Tensor, aten.index_put_.default):
            continue
        picked = _picks(module, OpCall(node).indices)
        source = OpCall(node).self
        if picked is None or value(source).shape[0] != 1:
            continue
        if is_op(node, aten.index_put_.default):
            if picked and not _replaces_all(node):
                continue
            node.replace_all_uses_with(OpCall(node).values if picked else source)
            graph.erase_node(node)
        elif picked:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            _update_shapes(source)
        num_rewritten += 1
    graph.eliminate_dead_code()
    return num_rewritten
