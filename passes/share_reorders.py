"""Layers that want their inputs' columns in the same order share what reorders them."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import aten, constant, drop_unused, is_op


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Keeps one of the selections from the same tensor that are alike; returns how many went."""
    kept: dict[tuple[Node, int], list[tuple[Node, torch.Tensor]]] = {}
    unused = []
    for node in list(module.graph.nodes):
        if not is_op(node, aten.index_select.default):
            continue
        source, dim, index = node.args
        order = constant(module, index)
        if order is None:
            continue
        alike = kept.setdefault((source, dim), [])
        same = next((one for one, other in alike if torch.equal(order, other)), None)
        if same is None:
            alike.append((node, order))
            continue
        node.replace_all_uses_with(same)
        module.graph.erase_node(node)
        unused.append(str(index.target))
    drop_unused(module, *unused)
    return len(unused)
