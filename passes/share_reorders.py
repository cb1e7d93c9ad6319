"""Layers with the same column permutation (act-order) share the reordered input."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import aten, constant, drop_unused, is_op


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Merges equal column selections of the same tensor."""
    selections: dict[tuple[Node, int], list[tuple[Node, torch.Tensor]]] = {}
    unused = []
    for node in list(module.graph.nodes):
        if not is_op(node, aten.index_select.default):
            continue
        source, dim, index = node.args
        permutation = constant(module, index)
        if permutation is None:
            continue
        candidates = selections.setdefault((source, dim), [])
        same = next((first for first, other in candidates if torch.equal(permutation, other)), None)
        if same is None:
            candidates.append((node, permutation))
            continue
        node.replace_all_uses_with(same)
        module.graph.erase_node(node)
        unused.append(str(index.target))
    drop_unused(module, *unused)
    return len(unused)
