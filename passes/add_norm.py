"""Fusion of residual adds into norms: ``norm(a + b)`` becomes ``add_…_norm(a, b)``."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import aten, call, match, value


def _copy_constant(graph: fx.Graph, operand: Any) -> Any:
    """Copies a constant's node to the insertion point; returns any other operand unchanged."""
    if not isinstance(operand, fx.Node) or operand.op != "get_attr":
        return operand
    constant = graph.get_attr(str(operand.target))
    constant.meta = dict(operand.meta)
    return constant


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Fuses residual adds into the norms that read them; other users read the sum from the fused op."""
    fused = {
        torch.ops.armllm.rms_norm.default: torch.ops.armllm.add_rms_norm.default,
        torch.ops.armllm.layer_norm.default: torch.ops.armllm.add_layer_norm.default,
    }
    graph = module.graph
    num_rewritten = 0
    for norm in list(graph.nodes):
        if norm.op != "call_function" or norm.target not in fused:
            continue
        x, *operands = norm.args
        found = match(x, aten.add.Tensor, alpha=1)
        if found is None:
            continue
        add, a, b = found.node, found.self, found.other
        if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)):
            continue
        if value(a).shape != value(b).shape or value(a).dtype != value(b).dtype:
            continue
        with graph.inserting_before(add.next):
            # the norm's other operands are constants, whose nodes may come later in the graph
            others = [_copy_constant(graph, operand) for operand in operands]
            both = call(graph, fused[norm.target], a, b, *others)
        with graph.inserting_before(both.next):
            normed = call(graph, operator.getitem, both, 0)
            total = call(graph, operator.getitem, both, 1)
        norm.replace_all_uses_with(normed)
        add.replace_all_uses_with(total)
        graph.erase_node(norm)
        graph.erase_node(add)
        num_rewritten += 1
    return num_rewritten
