"""Routers whose experts a table names for every token id; the logits only weigh them (DeepSeek-V4)."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.ops.moe import SCORINGS, reference_moe_route
from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.graph import CONVERSIONS, aten, call, constant, is_op, new_constant, strip, value
from torch_armllm.passes.lib.probe import Region, regions
from torch_armllm.passes.lib.router import logits_of, probe_logits

_RTOL = 1e-5


@dataclass(frozen=True)
class TableRouter:
    """A router of this kind.

    Attributes:
        region: nodes from the logits to the weights.
        token_ids: input of the graph.
        choices: int32 ``(vocabulary, top_k)``.
        scoring, renormalize, scale: how logits become weights, as in ``moe_route``.
    """

    region: Region
    token_ids: Node
    choices: Tensor
    scoring: str
    renormalize: bool
    scale: float

    def replace(self, module: fx.GraphModule, moe: Node) -> None:
        """Computes ids and weights of experts by ``moe_route``."""
        graph = module.graph
        choices = new_constant(module, moe, "experts_by_id", self.choices)
        with graph.inserting_before(moe):
            logits = logits_of(graph, self.region.entry)
            options = (self.choices.shape[1], self.scoring, self.renormalize, self.scale)
            by_id = {"token_ids": self.token_ids, "choices": choices}
            routed = call(graph, torch.ops.armllm.moe_route.default, logits, *options, **by_id)
            weights, ids = (call(graph, operator.getitem, routed, i) for i in range(2))
        OpCall(moe).replace(expert_ids=ids, expert_weights=weights)
        self.region.erase(graph)


def _looked_up(module: fx.GraphModule, ids: Any) -> tuple[Tensor, Node] | None:
    """Returns a table of experts and the token ids by which it is read; None if ids come from elsewhere."""
    node = strip(ids, *CONVERSIONS, aten.view.default, aten.reshape.default, aten.select.int)
    if is_op(node, aten.index.Tensor) and len(OpCall(node).indices) == 1:
        source, (tokens,) = OpCall(node).self, OpCall(node).indices
    elif is_op(node, aten.embedding.default):
        source, tokens = OpCall(node).weight, OpCall(node).indices
    else:
        return None
    table = constant(module, source)
    tokens = strip(tokens, aten.view.default, aten.reshape.default, aten.flatten.using_ints)
    if table is None or table.dim() != 2 or table.is_floating_point() or not isinstance(tokens, Node):
        return None
    return (table, tokens) if tokens.op == "placeholder" and tokens.name == "input_ids" else None


def recognize_table_router(
    module: fx.GraphModule, ids: Node, weights: Node, experts: int
) -> TableRouter | None:
    """Returns the router of this kind that computes the ids and weights of experts; None if none does."""
    found = _looked_up(module, ids)
    if found is None:
        return None
    table, tokens = found
    if int(table.min()) < 0 or int(table.max()) >= experts or value(ids).dim() != 2:
        return None
    logits, choices = probe_logits(experts), table.to(torch.int32)
    rows = torch.arange(len(logits)) % len(table)
    for region in regions((weights,), {ids}):
        entry = region.entry.meta.get("val")
        if not isinstance(entry, Tensor) or entry.shape[-1] != experts or not entry.is_floating_point():
            continue
        try:
            (result,) = region.values(module, logits, {ids: table[rows].to(value(ids).dtype)})
        except Exception:  # noqa: BLE001 - a region that cannot run on logits is no router
            continue
        if result.shape != (len(logits), table.shape[1]):
            continue
        for scoring in SCORINGS:
            for renormalize in (False, True):
                expected, _ = reference_moe_route(
                    logits, table.shape[1], scoring, renormalize, token_ids=rows, choices=choices
                )
                scale = float((result.double().sum() / expected.double().sum()).item())
                scale = round(scale, 4) if abs(scale - round(scale, 4)) < _RTOL * abs(scale) else scale
                if scale > 0 and torch.allclose(result, expected * scale, rtol=_RTOL, atol=0):
                    return TableRouter(region, tokens, choices, scoring, renormalize, scale)
    return None
