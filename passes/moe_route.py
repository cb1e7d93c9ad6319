"""Routers in front of fused experts: scores, choice and weights become ``moe_route``.

A router is recognized by what it computes: the part of the graph between its logits and the experts is run on
random logits, and a setting of ``moe_route`` that gives the same choice and weights takes its place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.ops.moe import SCORINGS, reference_moe_route
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import (
    aten,
    call,
    constant,
    is_op,
    new_constant,
    unwidened,
    value,
)
from torch_armllm.passes.lib.probe import Region, regions

_EXPERTS = (torch.ops.armllm.int4_moe.default, torch.ops.armllm.experts.default)
_ROWS = 96
_RTOL = 1e-5


@dataclass(frozen=True)
class Route:
    """A setting of ``moe_route``; ``bias`` is the node of its correction bias."""

    scoring: str
    renormalize: bool
    scale: float = 1.0
    bias: Node | None = None
    groups: int = 1
    top_k_groups: int = 1


def _settings(region: Region, biases: list[Node], experts: int, top_k: int) -> Iterator[Route]:
    """Every setting that the constants and integers of a router allow."""
    numbers = region.integers()
    grouped = [
        (g, kept)
        for g in sorted(numbers)
        if 1 < g < experts and experts % g == 0
        for kept in sorted(numbers)
        if 0 < kept < g and kept * (experts // g) >= top_k
    ]
    for scoring, bias, (groups, kept) in product(SCORINGS, [None, *biases], [(1, 1), *grouped]):
        for renormalize in (False, True) if scoring != "topk_softmax" else (False,):
            yield Route(scoring, renormalize, 1.0, bias, groups, kept)


@cache
def _probe(experts: int) -> Tensor:
    """Random logits; some so low that a constant added to a sum of scores shows."""
    logits = torch.randn(_ROWS, experts, generator=torch.Generator().manual_seed(0)) * 2
    logits[_ROWS // 2 :] -= 12
    return logits


def _by_id(weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    order = ids.argsort(-1)
    return weights.float().gather(-1, order), ids.gather(-1, order)


Choice = Callable[[list[Tensor]], tuple[Tensor, Tensor]]
"""Makes ids and weights, ``(rows, top_k)``, of a region's results."""


def recognize(
    module: fx.GraphModule, results: tuple[Node, ...], experts: int, choice: Choice
) -> tuple[Region, Route, int] | None:
    """The part of a graph that makes ``results`` from logits, the setting that does the same, and top_k."""
    for region in regions(results):
        entry = region.entry.meta.get("val")
        # the size of the tokens may stand behind a 1: it is run on plain rows all the same
        if not isinstance(entry, Tensor) or entry.shape[-1] != experts or not entry.is_floating_point():
            continue
        found = _setting_of(module, region, experts, choice)
        if found is not None:
            return region, *found
    return None


def _setting_of(
    module: fx.GraphModule, region: Region, experts: int, choice: Choice
) -> tuple[Route, int] | None:
    logits = _probe(experts)
    try:
        ids, weights = choice(region.run(module, logits))
    except Exception:  # noqa: BLE001 - not a router, if it cannot be run on logits
        return None
    shapes_fit = ids.shape == weights.shape and ids.dim() == 2 and ids.shape[0] == _ROWS
    if not shapes_fit or ids.is_floating_point() or not 0 < (top_k := ids.shape[1]) <= experts:
        return None
    weights, ids = _by_id(weights, ids)
    biases = [n for n in region.constants(module) if value(n).numel() == experts]
    for setting in _settings(region, biases, experts, top_k):
        bias = None if setting.bias is None else constant(module, setting.bias)
        options = (None if bias is None else bias.float().flatten(), setting.groups, setting.top_k_groups)
        own, own_ids = _by_id(
            *reference_moe_route(logits, top_k, setting.scoring, setting.renormalize, 1.0, *options)
        )
        if not torch.equal(ids, own_ids):
            continue
        scale = float((weights.double().sum() / own.double().sum()).item())
        scale = round(scale, 4) if abs(scale - round(scale, 4)) < _RTOL * abs(scale) else scale
        if scale > 0 and torch.allclose(weights, own * scale, rtol=_RTOL, atol=0):
            return replace(setting, scale=scale), top_k
    return None


def _logits(graph: fx.Graph, entry: Node) -> Node:
    """The entry as rows, in the type in which it was made."""
    entry = unwidened(entry)
    flat = value(entry).dim() == 2
    return entry if flat else call(graph, aten.reshape.default, entry, [-1, value(entry).shape[-1]])


def insert(module: fx.GraphModule, before: Node, entry: Node, route: Route, top_k: int) -> tuple[Node, Node]:
    """Puts a ``moe_route`` in front of a node; returns its ids and weights."""
    graph, bias = module.graph, route.bias
    own = constant(module, bias)
    if own is not None and (own.dtype != torch.float32 or own.dim() != 1):
        bias = new_constant(module, before, "correction_bias", own.float().flatten())
    with graph.inserting_before(before):
        routed = call(
            graph,
            torch.ops.armllm.moe_route.default,
            *(_logits(graph, entry), top_k, route.scoring, route.renormalize),
            *(route.scale, bias, route.groups, route.top_k_groups),
        )
        weights = call(graph, operator.getitem, routed, 0)
        return call(graph, operator.getitem, routed, 1), weights


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Fuses the routing of every ``int4_moe`` (and float ``experts``) that it recognizes.

    Returns:
        The number of routers fused.
    """
    graph = module.graph
    found = 0
    for node in list(graph.nodes):
        if not is_op(node, *_EXPERTS) or not all(isinstance(argument, Node) for argument in node.args[1:3]):
            continue
        ids, weights, gate_up = node.args[1:4]
        match = recognize(
            module, (ids, weights), int(value(gate_up).shape[0]), lambda made: (made[0], made[1])
        )
        if match is None:
            continue
        region, route, top_k = match
        for position, made in enumerate(insert(module, node, region.entry, route, top_k), 1):
            node.update_arg(position, made)
        region.erase(graph)
        found += 1
    graph.eliminate_dead_code()
    return found
