"""Products of each token with several constant matrices become ``dense_heads_linear``."""

from __future__ import annotations

import torch
from torch import fx

from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import aten, call, constant, is_op, new_constant, value


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Rewrites ``bmm`` of tokens ``(n, T, in)`` and a constant ``(n, in, out)``, as in shared experts.

    Returns:
        The number of products rewritten.
    """
    graph = module.graph
    num_rewritten = 0
    for node in list(graph.nodes):
        if not is_op(node, aten.bmm.default):
            continue
        tokens, weight = node.args[0], constant(module, node.args[1])
        if weight is None or isinstance(value(tokens).shape[0], torch.SymInt):
            continue
        matrices = new_constant(module, node, "matrices", weight.transpose(1, 2).contiguous())
        with graph.inserting_before(node):
            by_token = call(graph, aten.transpose.int, tokens, 0, 1)
            out = call(graph, torch.ops.armllm.dense_heads_linear.default, by_token, matrices)
            node.replace_all_uses_with(call(graph, aten.transpose.int, out, 0, 1))
        graph.erase_node(node)
        num_rewritten += 1
    graph.eliminate_dead_code()
    return num_rewritten
