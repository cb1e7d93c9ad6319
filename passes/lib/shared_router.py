"""Routers that weigh routed and shared experts together: shares of the sum of both kinds' sigmoid scores.

The routed experts with the highest corrected scores are chosen.  Their scores, and those of the shared
experts, which have logits of their own behind the routed ones, are divided by their sum (Inkling).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.ops.moe import reference_moe_route
from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.graph import CONVERSIONS, aten, call, match, strip, value
from torch_armllm.passes.lib.probe import Region, regions
from torch_armllm.passes.lib.router import Route, by_id, insert_route, probe_constant, probe_logits

_RTOL = 1e-5


@dataclass(frozen=True)
class SharedRouter:
    """A router of this kind.

    Attributes:
        region: nodes from the logits ``(T, experts + shared)`` to ids and shares.
        route: how the routed experts are chosen; its scale is that of all shares.
        experts: number of routed experts.
        top_k: number of experts that are chosen for a token.
    """

    region: Region
    route: Route
    experts: int
    top_k: int

    def replace(self, module: fx.GraphModule, moe: Node) -> None:
        """Computes ids and shares of experts by ``moe_route``."""
        graph, (_, shares) = module.graph, self.region.results
        logits = self.region.entry
        with graph.inserting_before(shares):
            routed = call(graph, aten.slice.Tensor, logits, -1, 0, self.experts)
            own = call(graph, aten.slice.Tensor, logits, -1, self.experts, value(logits).shape[-1])
        plain = Route(self.route.scoring, False, 1.0, self.route.bias)
        ids, weights = insert_route(module, shares, routed, plain, self.top_k)
        with graph.inserting_before(shares):
            scores = call(graph, aten.sigmoid.default, call(graph, aten.to.dtype, own, torch.float32))
            total = call(
                graph,
                aten.add.Tensor,
                call(graph, aten.sum.dim_IntList, weights, [-1], True),
                call(graph, aten.sum.dim_IntList, scores, [-1], True),
            )
            both = call(graph, aten.cat.default, [weights, scores], -1)
            scaled = call(graph, aten.mul.Tensor, both, self.route.scale)
            new = call(graph, aten.div.Tensor, scaled, total)
            of_routed = call(graph, aten.slice.Tensor, new, -1, 0, self.top_k)  # moe_route's are float32 too
            if value(shares).dtype != torch.float32:
                new = call(graph, aten.to.dtype, new, value(shares).dtype)
        shares.replace_all_uses_with(new)
        OpCall(moe).replace(expert_ids=ids, expert_weights=of_routed)
        self.region.erase(graph)


def recognize_shared_router(
    module: fx.GraphModule, ids: Node, weights: Any, experts: int
) -> SharedRouter | None:
    """Returns the router of this kind that computes ids and weights of routed experts; None if none does."""
    first = match(strip(weights, aten.contiguous, *CONVERSIONS), aten.slice.Tensor, start=0)
    if first is None:
        return None
    shares, top_k = first.self, int(value(ids).shape[-1])
    if value(shares).dim() != 2 or value(shares).shape[-1] <= top_k:
        return None
    columns = experts + int(value(shares).shape[-1]) - top_k
    for region in regions((ids, shares)):
        entry = region.entry.meta.get("val")
        if isinstance(entry, Tensor) and entry.shape[-1] == columns and entry.is_floating_point():
            route = _route_of(module, region, experts, columns, top_k)
            if route is not None:
                return SharedRouter(region, route, experts, top_k)
    return None


def _route_of(module: fx.GraphModule, region: Region, experts: int, columns: int, top_k: int) -> Route | None:
    logits = probe_logits(columns)
    biases = [
        n for n in region.constants(module) if value(n).numel() == experts and value(n).is_floating_point()
    ]
    values = {n: probe_constant(value(n).shape, i) for i, n in enumerate(biases)}
    try:
        ids, shares = region.values(module, logits, values)
    except Exception:  # noqa: BLE001 - a region that cannot run on logits is no router
        return None
    if ids.shape != (len(logits), top_k) or shares.shape != (len(logits), columns - experts + top_k):
        return None
    routed, ids = by_id(shares[:, :top_k], ids)
    for bias in (None, *biases):
        scores, expected_ids = reference_moe_route(
            logits[:, :experts],
            top_k,
            "sigmoid",
            False,
            1.0,
            None if bias is None else values[bias].flatten(),
        )
        scores, expected_ids = by_id(scores, expected_ids)
        if not torch.equal(ids, expected_ids):
            continue
        expected = torch.cat([scores, logits[:, experts:].sigmoid()], -1)
        expected = expected / expected.sum(-1, keepdim=True)
        found = torch.cat([routed, shares[:, top_k:]], -1)
        scale = float((found.double().sum() / expected.double().sum()).item())
        if scale > 0 and torch.allclose(found, expected * scale, rtol=_RTOL, atol=0):
            return Route("sigmoid", False, scale, bias)
    return None
