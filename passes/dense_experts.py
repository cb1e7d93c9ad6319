"""Dense experts (Llama 4), run on every token scaled by its score, compute the chosen tokens only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import CONVERSIONS, aten, is_op, match, only_user, strip, value
from torch_armllm.passes.lib.router import insert_route, recognize_router


def _scaled_tokens(moe: Node, experts: int) -> tuple[Node, Node] | None:
    """Matches the input ``h.repeat(E, 1) * scores.T.reshape(-1, 1)``; returns h and scores (T, E)."""
    scaled = match(OpCall(moe).x, aten.mul.Tensor)
    if scaled is None:
        return None
    for side, column in ((scaled.self, scaled.other), (scaled.other, scaled.self)):
        repeated = match(side, aten.repeat.default, repeats=[experts, 1])
        view = match(strip(column, *CONVERSIONS), aten.reshape, aten.view)
        transposed = None if view is None else match(view.self, aten.transpose.int, aten.t.default)
        if repeated is not None and transposed is not None and value(transposed.node).shape[0] == experts:
            return repeated.self, transposed.self
    return None


def _sum_over_experts(moe: Node, experts: int) -> Node | None:
    """Matches ``experts(…).reshape(E, -1, H).sum(0)``; returns the node of the sum."""
    parts: Any = only_user(moe)
    while is_op(parts, aten.view, aten.reshape) and value(parts).dim() == 2:
        parts = only_user(parts)
    if not is_op(parts, aten.view, aten.reshape) or value(parts).shape[0] != experts:
        return None
    total = only_user(parts)
    return total if match(total, aten.sum.dim_IntList, dim=[0]) is not None else None


def _nonzero_scores(results: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns ids and weights of the nonzero scores; no weights if their number differs between rows."""
    counts = (results[0] != 0).sum(-1)
    weights, ids = results[0].topk(int(counts.max()), dim=-1)
    return ids, weights if bool((counts == counts[0]).all()) else weights[:0]


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Rewrites quantized dense experts without biases, for which a zero input has a zero output."""
    graph = module.graph
    num_rewritten = 0
    for node in list(graph.nodes):
        if not is_op(node, torch.ops.armllm.int4_moe.default):
            continue
        moe = OpCall(node)
        if moe.gate_up_bias is not None or moe.down_bias is not None or moe.identity_experts:
            continue
        experts = int(value(moe.gate_up).shape[0])
        source, total = _scaled_tokens(node, experts), _sum_over_experts(node, experts)
        if source is None or total is None or value(source[0]).dim() != 2:
            continue
        match = recognize_router(module, (source[1],), experts, _nonzero_scores)
        if match is None:
            continue
        region, route, top_k = match
        ids, weights = insert_route(module, node, region.entry, route, top_k)
        moe.replace(x=source[0], expert_ids=ids, expert_weights=weights, weigh_input=True)
        node.meta["val"] = value(source[0])
        total.replace_all_uses_with(node)
        graph.eliminate_dead_code()
        region.erase(graph)
        num_rewritten += 1
    return num_rewritten
