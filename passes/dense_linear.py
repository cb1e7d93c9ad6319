"""Small float linear layers (routers) become ``dense_linear``; a quantized step then has fused ops only."""

from __future__ import annotations

import torch
from torch import fx

from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import aten, call, constant, is_op, unwidened

MAX_WEIGHTS = 1 << 22
"""Above this many weights, PyTorch's own matrix product is faster."""


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Rewrites small ``aten.linear`` with constant weights.

    Returns:
        The number of layers rewritten.
    """
    graph = module.graph
    num_rewritten = 0
    for node in list(graph.nodes):
        if not is_op(node, aten.linear.default):
            continue
        x, *weights = (unwidened(argument) for argument in node.args)
        weight = constant(module, weights[0])
        if weight is None or weight.numel() > MAX_WEIGHTS:
            continue
        weights += [None] * (2 - len(weights))
        with graph.inserting_before(node):
            wide = x is not OpCall(node).input
            linear = call(graph, torch.ops.armllm.dense_linear.default, x, *weights, wide)
        node.replace_all_uses_with(linear)
        graph.erase_node(node)
        num_rewritten += 1
    return num_rewritten
