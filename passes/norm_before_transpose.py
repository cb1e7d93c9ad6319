"""Norms of heads run before the transpose: ``norm(x.transpose(1, 2))`` → ``norm(x).transpose(1, 2)``."""

from __future__ import annotations

import torch
from torch import fx

from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import aten, call, is_op, value


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Moves transposes after the norms that read them.

    Returns:
        The number of norms moved.
    """
    graph = module.graph
    norms = (torch.ops.armllm.rms_norm.default, torch.ops.armllm.layer_norm.default)
    num_rewritten = 0
    for node in list(graph.nodes):
        if not is_op(node, *norms) or not is_op(node.args[0], aten.transpose.int):
            continue
        transposed = node.args[0]
        if tuple(transposed.args[1:]) != (1, 2) or value(transposed).dim() != 4:
            continue
        with graph.inserting_before(node):
            normed = call(graph, node.target, transposed.args[0], *node.args[1:])
            node.replace_all_uses_with(call(graph, aten.transpose.int, normed, 1, 2))
        graph.erase_node(node)
        num_rewritten += 1
    graph.eliminate_dead_code()
    return num_rewritten
