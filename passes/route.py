"""Routers in front of fused experts: softmax, top-k and renormalisation become ``moe_route``."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.passes.match import CONVERSIONS, PassContext, aten, call, is_op, strip, value


def _renormalised(node: Any) -> Any:
    """``v / v.sum(-1, keepdim)`` → v, else None."""
    if not is_op(node, aten.div.Tensor, aten.div_.Tensor):
        return None
    top, total = node.args[:2]
    if is_op(total, aten.sum.dim_IntList) and total.args[0] is top and list(total.args[1]) == [-1]:
        return top
    return None


def _match(moe: Node) -> tuple[Node, int, bool] | None:
    """Logits, top_k and whether the weights are renormalised."""
    ids, weights = (strip(a, *CONVERSIONS) for a in moe.args[1:3])
    top = _renormalised(weights)
    renormalise = top is not None
    top = strip(top if renormalise else weights, *CONVERSIONS)
    if not (is_op(ids, operator.getitem) and is_op(top, operator.getitem)):
        return None
    if ids.args[0] is not top.args[0] or (top.args[1], ids.args[1]) != (0, 1):
        return None
    topk: Any = top.args[0]
    if not is_op(topk, aten.topk.default) or (len(topk.args) > 2 and topk.args[2] not in (-1, 1)):
        return None
    softmax = strip(topk.args[0], *CONVERSIONS)
    if not is_op(softmax, aten.softmax.int) or softmax.args[1] not in (-1, 1):
        return None
    logits = strip(softmax.args[0], *CONVERSIONS)
    return (logits, topk.args[1], renormalise) if value(logits).dim() == 2 else None


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Fuses the routing of every ``int4_moe`` (and float ``experts``) that it recognises.

    Returns:
        The number of routers fused.
    """
    graph = module.graph
    found = 0
    for node in list(graph.nodes):
        if not is_op(node, torch.ops.armllm.int4_moe.default, torch.ops.armllm.experts.default):
            continue
        match = _match(node)
        if match is None:
            continue
        logits, top_k, renormalise = match
        with graph.inserting_before(node):
            routed = call(graph, torch.ops.armllm.moe_route.default, logits, top_k, "softmax", renormalise)
            weights = call(graph, operator.getitem, routed, 0)
            ids = call(graph, operator.getitem, routed, 1)
        divided = strip(node.args[2], *CONVERSIONS)
        node.update_arg(1, ids)
        node.update_arg(2, weights)
        # dead code is kept where it writes in place, as transformers' renormalisation does
        if is_op(divided, aten.div_.Tensor) and not divided.users:
            graph.erase_node(divided)
        found += 1
    graph.eliminate_dead_code()
    return found
