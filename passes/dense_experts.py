"""Dense experts (Llama 4), run on every token scaled by its score, compute the chosen tokens only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import CONVERSIONS, aten, is_op, only_user, strip, value
from torch_armllm.passes.lib.router import insert_route, recognize_router

_DEFAULTS: tuple[Any, ...] = (7.0, None, None, True, False, 0, 7.0, False)
"""Defaults of int4_moe's arguments after the activation, from its limit to its rotation."""


def _scaled_tokens(moe: Node, experts: int) -> tuple[Node, Node] | None:
    """Matches the input ``h.repeat(E, 1) * scores.T.reshape(-1, 1)``; returns h and scores (T, E)."""
    scaled: Any = moe.args[0]
    if not is_op(scaled, aten.mul.Tensor):
        return None
    sides: list[Any] = list(scaled.args[:2])
    for repeated, column in (sides, sides[::-1]):
        if not is_op(repeated, aten.repeat.default) or list(repeated.args[1]) != [experts, 1]:
            continue
        column = strip(column, *CONVERSIONS)
        transposed: Any = column.args[0] if is_op(column, aten.reshape, aten.view) else None
        if is_op(transposed, aten.transpose.int, aten.t.default) and value(transposed).shape[0] == experts:
            return repeated.args[0], transposed.args[0]
    return None


def _sum_over_experts(moe: Node, experts: int) -> Node | None:
    """Matches ``experts(…).reshape(E, -1, H).sum(0)``; returns the node of the sum."""
    parts: Any = only_user(moe)
    while is_op(parts, aten.view, aten.reshape) and value(parts).dim() == 2:
        parts = only_user(parts)
    if not is_op(parts, aten.view, aten.reshape) or value(parts).shape[0] != experts:
        return None
    total: Any = only_user(parts)
    return total if is_op(total, aten.sum.dim_IntList) and list(total.args[1]) == [0] else None


def _nonzero_scores(results: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns ids and weights of the nonzero scores; no weights if their number differs between rows."""
    counts = (results[0] != 0).sum(-1)
    weights, ids = results[0].topk(int(counts.max()), dim=-1)
    return ids, weights if bool((counts == counts[0]).all()) else weights[:0]


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Rewrites quantized dense experts without biases, for which a zero input has a zero output.

    Returns:
        The number of experts layers rewritten.
    """
    graph = module.graph
    num_rewritten = 0
    for node in list(graph.nodes):
        if not is_op(node, torch.ops.armllm.int4_moe.default):
            continue
        arguments: list[Any] = [*node.args, *_DEFAULTS[len(node.args) - 8 :]]
        if arguments[9] is not None or arguments[10] is not None or arguments[13]:
            continue
        experts = int(value(arguments[3]).shape[0])
        source, total = _scaled_tokens(node, experts), _sum_over_experts(node, experts)
        if source is None or total is None or value(source[0]).dim() != 2:
            continue
        match = recognize_router(module, (source[1],), experts, _nonzero_scores)
        if match is None:
            continue
        region, route, top_k = match
        ids, weights = insert_route(module, node, region.entry, route, top_k)
        node.args = (source[0], ids, weights, *arguments[3:12], True, *arguments[13:])
        node.meta["val"] = value(source[0])
        total.replace_all_uses_with(node)
        graph.eliminate_dead_code()
        region.erase(graph)
        num_rewritten += 1
    return num_rewritten
