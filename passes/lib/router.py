"""Recognition of routers: the part of a graph between logits and experts, as a setting of ``moe_route``.

A router is recognized by its results: the region between its logits and the experts is run on random logits,
and compared with the settings of ``moe_route``.
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
from torch_armllm.passes.lib.graph import aten, call, call_op, constant, new_constant, unwidened, value
from torch_armllm.passes.lib.probe import Region, regions

_ROWS = 96
_RTOL = 1e-5
_EPSILON = 1e-20
"""Default of ``moe_route``."""


_INDEPENDENT = ("sigmoid", "topk_sigmoid", "sqrt_softplus")
"""Scores of single experts, to whose sum models add a small number."""


@dataclass(frozen=True)
class Route:
    """A setting of ``moe_route``; ``bias`` is the node of its correction bias."""

    scoring: str
    renormalize: bool
    scale: float = 1.0
    bias: Node | None = None
    groups: int = 1
    top_k_groups: int = 1
    epsilon: float = _EPSILON


def _settings(region: Region, biases: list[Node], experts: int, top_k: int) -> Iterator[Route]:
    """Yields every setting that the constants and integers of a router allow."""
    numbers = region.integers()
    grouped = [
        (g, top_k_groups)
        for g in sorted(numbers)
        if 1 < g < experts and experts % g == 0
        for top_k_groups in sorted(numbers)
        if 0 < top_k_groups < g and top_k_groups * (experts // g) >= top_k
    ]
    for scoring, bias, (groups, top_k_groups) in product(SCORINGS, [None, *biases], [(1, 1), *grouped]):
        if scoring == "sparsemixer":
            for margin in region.small_numbers(most=1.0):
                yield Route(scoring, False, 1.0, bias, groups, top_k_groups, margin)
            continue
        for renormalize in (False, True) if scoring != "topk_softmax" else (False,):
            epsilons = region.small_numbers() if renormalize and scoring in _INDEPENDENT else ()
            for epsilon in (_EPSILON, *epsilons):
                yield Route(scoring, renormalize, 1.0, bias, groups, top_k_groups, epsilon)


@cache
def probe_logits(experts: int) -> Tensor:
    """Returns random logits; half of them are low, which reveals a constant added to a sum of scores."""
    logits = torch.randn(_ROWS, experts, generator=torch.Generator().manual_seed(0)) * 2
    logits[_ROWS // 2 :] -= 12
    return logits


def probe_constant(shape: torch.Size, seed: int) -> Tensor:
    """Returns random values in place of a constant's own.

    A model's own values hide what is done with them if they are all equal, or too small to change a choice.
    The values are not negative: routers of groups mask scores by zero, and expect the others to be above it.
    """
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed + 1)) / 2


def by_id(weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns weights and ids of each row in the order of the ids."""
    order = ids.argsort(-1)
    return weights.float().gather(-1, order), ids.gather(-1, order)


Choice = Callable[[list[Tensor]], tuple[Tensor, Tensor]]
"""Converts a region's results to ids and weights, ``(rows, top_k)``."""


def recognize_router(
    module: fx.GraphModule, results: tuple[Node, ...], experts: int, choice: Choice
) -> tuple[Region, Route, int] | None:
    """Returns the largest region that computes ``results`` from logits, its setting, and top_k."""
    found = None
    for region in regions(results):
        entry = region.entry.meta.get("val")
        # the entry may be (1, T, experts): it is still run on plain rows
        if not isinstance(entry, Tensor) or entry.shape[-1] != experts or not entry.is_floating_point():
            continue
        setting = _setting_of(module, region, experts, choice)
        if setting is not None:
            found = (region, *setting)
    return found


def _setting_of(
    module: fx.GraphModule, region: Region, experts: int, choice: Choice
) -> tuple[Route, int] | None:
    logits = probe_logits(experts)
    biases = [
        n for n in region.constants(module) if value(n).numel() == experts and value(n).is_floating_point()
    ]
    values = {n: probe_constant(value(n).shape, i) for i, n in enumerate(biases)}
    try:
        ids, weights = choice(region.values(module, logits, values))
    except Exception:  # noqa: BLE001 - a region that cannot run on logits is no router
        return None
    shapes_fit = ids.shape == weights.shape and ids.dim() == 2 and ids.shape[0] == _ROWS
    if not shapes_fit or ids.is_floating_point() or not 0 < (top_k := ids.shape[1]) <= experts:
        return None
    weights, ids = by_id(weights, ids)
    for setting in _settings(region, biases, experts, top_k):
        bias = None if setting.bias is None else values[setting.bias].flatten()
        options = (bias, setting.groups, setting.top_k_groups, setting.epsilon)
        expected, expected_ids = by_id(
            *reference_moe_route(logits, top_k, setting.scoring, setting.renormalize, 1.0, *options)
        )
        if not torch.equal(ids, expected_ids):
            continue
        scale = float((weights.double().sum() / expected.double().sum()).item())
        scale = round(scale, 4) if abs(scale - round(scale, 4)) < _RTOL * abs(scale) else scale
        if scale > 0 and torch.allclose(weights, expected * scale, rtol=_RTOL, atol=0):
            return replace(setting, scale=scale), top_k
    return None


def logits_of(graph: fx.Graph, entry: Node) -> Node:
    """Returns the entry as rows, without conversions to float32."""
    entry = unwidened(entry)
    flat = value(entry).dim() == 2
    return entry if flat else call(graph, aten.reshape.default, entry, [-1, value(entry).shape[-1]])


def insert_route(
    module: fx.GraphModule, before: Node, entry: Node, route: Route, top_k: int
) -> tuple[Node, Node]:
    """Inserts a ``moe_route`` before a node; returns its ids and weights."""
    graph, bias = module.graph, route.bias
    bias_tensor = constant(module, bias)
    if bias_tensor is not None and (bias_tensor.dtype != torch.float32 or bias_tensor.dim() != 1):
        bias = new_constant(module, before, "correction_bias", bias_tensor.float().flatten())
    with graph.inserting_before(before):
        routed = call_op(
            graph,
            torch.ops.armllm.moe_route.default,
            logits=logits_of(graph, entry),
            top_k=top_k,
            scoring=route.scoring,
            renormalize=route.renormalize,
            scale=route.scale,
            correction_bias=bias,
            groups=route.groups,
            top_k_groups=route.top_k_groups,
            epsilon=route.epsilon,
        )
        weights = call(graph, operator.getitem, routed, 0)
        return call(graph, operator.getitem, routed, 1), weights
