"""Routers of fused experts: scores, choice and weights become ``moe_route``."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import is_op, value
from torch_armllm.passes.lib.router import insert_route, recognize_router

_EXPERTS = (torch.ops.armllm.int4_moe.default, torch.ops.armllm.experts.default)


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Fuses the routing of every ``int4_moe`` (and float ``experts``) that it recognizes.

    Returns:
        The number of routers fused.
    """
    graph = module.graph
    num_rewritten = 0
    for node in list(graph.nodes):
        if not is_op(node, *_EXPERTS) or not all(isinstance(argument, Node) for argument in node.args[1:3]):
            continue
        ids, weights, gate_up = node.args[1:4]
        match = recognize_router(
            module, (ids, weights), int(value(gate_up).shape[0]), lambda results: (results[0], results[1])
        )
        if match is None:
            continue
        region, route, top_k = match
        for position, result in enumerate(insert_route(module, node, region.entry, route, top_k), 1):
            node.update_arg(position, result)
        region.erase(graph)
        num_rewritten += 1
    graph.eliminate_dead_code()
    return num_rewritten
