"""Small float linear layers (routers) become ``dense_linear``; a quantized step then has fused ops only."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import aten, call, constant, is_op, replace_nodes, unwidened

MAX_WEIGHTS = 1 << 22
"""Above this many weights, PyTorch's own matrix product is faster."""


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Rewrites small ``aten.linear`` with constant weights."""
    return replace_nodes(module.graph, lambda node: _dense_linear(module, node))


def _dense_linear(module: fx.GraphModule, node: Node) -> Node | None:
    if not is_op(node, aten.linear.default):
        return None
    x, *weights = (unwidened(argument) for argument in node.args)
    weight = constant(module, weights[0])
    if weight is None or weight.numel() > MAX_WEIGHTS:
        return None
    weights += [None] * (2 - len(weights))
    wide = x is not OpCall(node).input
    return call(module.graph, torch.ops.armllm.dense_linear.default, x, *weights, wide)
