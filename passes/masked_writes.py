"""Writes by a mask into a new tensor, such as ``ids[is_image] = 0``, become ``where`` and ``masked_fill``."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import aten, call, is_op, is_private, replace_nodes, strip, value


def _chosen(graph: fx.Graph, node: Node) -> Node | None:
    """``x[mask] = number`` is ``where(mask, number, x)``."""
    write = OpCall(node)
    mask = write.indices[0] if len(write.indices) == 1 else None
    if not isinstance(mask, Node) or write.accumulate:
        return None
    new, before = write.values, strip(write.self, aten.clone)
    if value(mask).dtype != torch.bool or value(mask).shape != value(before).shape or value(new).dim():
        return None
    if value(new).dtype != value(before).dtype:
        new = call(graph, aten.to.dtype, new, value(before).dtype)
    return call(graph, aten.where.self, mask, new, before)


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Rewrites writes to tensors that nothing else reads."""
    graph = module.graph

    def out_of_place(node: Node) -> Node | None:
        in_place = is_op(node, aten.index_put_.default, aten.masked_fill_.Scalar)
        if in_place and not is_private(OpCall(node).self):
            return None
        if is_op(node, aten.masked_fill_.Scalar):
            fill = OpCall(node)
            before = strip(fill.self, aten.clone)
            return call(graph, aten.masked_fill.Scalar, before, fill.mask, fill.value)
        return _chosen(graph, node) if is_op(node, aten.index_put_, aten.index_put) else None

    return replace_nodes(graph, out_of_place)
