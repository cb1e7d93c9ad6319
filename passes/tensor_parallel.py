"""Tensor parallelism: each rank computes some output columns of the quantized layers, and some heads.

A rank's columns are gathered behind each layer, so that every rank has all activations, with the bits that
one rank alone computes: no sum is divided.  Attention whose heads can be shared out needs no exchange between
its projections and its result, and a rank's KV cache holds its own heads only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.ops.linear.packed_layout import PANEL
from torch_armllm.parallel.rank_group import HeadShares, RankGroup, shares
from torch_armllm.passes.lib.attention_heads import (
    PROJECTIONS,
    AttentionHeads,
    Projection,
    attention_heads,
    per_head_arguments,
)
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import (
    aten,
    call,
    constant,
    drop_unused,
    is_op,
    new_constant,
    recompute,
    value,
)

armllm = torch.ops.armllm
_MOST_IMBALANCE = 1.5
"""Heads of the rank with the most, relative to the average, above which all ranks compute all heads."""


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Shares out attention heads and the columns of quantized layers; does nothing without a group.

    `PassContext.divides_heads` says whether the KV cache has a rank's heads only.

    Returns:
        The number of layers that are shared out.
    """
    group = context.group
    if group is None:
        return 0
    found = attention_heads(module)
    divided: set[Node] = set()
    if found is not None and (shared := _shares_of(found, group)) is not None:
        divided = _divide_heads(module, group, found, shared)
        context.divides_heads = True
    layers = [n for n in module.graph.nodes if n not in divided]
    count = len(divided)
    for node in layers:
        if is_op(node, *PROJECTIONS, armllm.int4_gated_linear.default):
            count += _divide_linear(module, group, node)
        elif is_op(node, armllm.int4_moe.default):
            count += _divide_experts(module, group, node)
    module.graph.eliminate_dead_code()
    return count


def _shares_of(found: AttentionHeads, group: RankGroup) -> dict[tuple[int, int], HeadShares] | None:
    """Returns each rank's heads by the numbers of heads; None if they cannot be shared out evenly enough."""
    every = {}
    for heads in found.heads:
        shared = HeadShares.of(*heads, group.size)
        if shared is None or shared.imbalance > _MOST_IMBALANCE:
            return None
        every[heads] = shared
    return every if all(_aligned(each, every[each.attention]) for each in found.projections) else None


def _aligned(each: Projection, shared: HeadShares) -> bool:
    """True if the rows of each rank's heads are whole panels of the layer."""
    ends = {n for heads in _heads_of(each, shared) for n in (heads.start, heads.stop)}
    return all((each.begin + n * each.width) % PANEL == 0 or n == each.heads for n in ends)


def _heads_of(each: Projection, shared: HeadShares) -> Sequence[range]:
    return shared.query if each.is_query else shared.key


def _divide_heads(
    module: fx.GraphModule, group: RankGroup, found: AttentionHeads, shared: dict[tuple[int, int], HeadShares]
) -> set[Node]:
    """Lets a rank compute its own heads; returns the layers that project to them."""
    by_layer: dict[Node, list[Projection]] = {}
    for each in found.projections:
        by_layer.setdefault(each.layer, []).append(each)
    changed: set[Node] = set()
    for layer, parts in by_layer.items():
        parts.sort(key=lambda each: each.begin)
        own = [(each, _heads_of(each, shared[each.attention])[group.rank]) for each in parts]
        _divide_projections(module, layer, own)
        changed |= {layer, *(each.part for each in parts), *(n for each in parts for n in each.nodes)}
    for node in module.graph.nodes:
        if node in changed:
            recompute(node)
    for node, heads in zip(found.attentions, found.heads, strict=True):
        _gather_heads(module, group, node, shared[heads])
    return set(by_layer)


def _divide_projections(module: fx.GraphModule, layer: Node, parts: list[tuple[Projection, range]]) -> None:
    weight = _constant(module, layer.args[1])
    rows: list[Tensor] = []
    columns: list[range] = []
    at = 0
    for each, heads in parts:
        chosen = range(each.begin + heads.start * each.width, each.begin + heads.stop * each.width)
        rows.append(weight[chosen.start // PANEL : -(-chosen.stop // PANEL)])
        columns.append(chosen)
        if each.part is not layer:
            each.part.args = (each.part.args[0], -1, at, at + len(chosen))
        view: Any = each.nodes[0]
        sizes = list(view.args[1])
        if sizes[-2] != -1:
            sizes[-2] = len(heads)
        view.args = (view.args[0], sizes)
        at += len(chosen)
    _replace_weight(module, layer, torch.cat(rows), at, columns)


def _gather_heads(module: fx.GraphModule, group: RankGroup, node: Node, shared: HeadShares) -> None:
    """Gathers the results of all heads behind an attention."""
    heads = shared.query[group.rank]
    for place in per_head_arguments(node):
        numbers = new_constant(
            module, node, "heads", _constant(module, node.args[place])[heads.start : heads.stop]
        )
        node.update_arg(place, numbers)
    before = list(node.users)
    recompute(node)
    size = int(value(node).shape[-1])
    columns = [len(each) * size for each in shared.query]
    graph = module.graph
    with graph.inserting_after(node):
        rows = call(graph, aten.reshape.default, node, [-1, columns[group.rank]])
    with graph.inserting_after(rows):
        gathered = call(graph, armllm.gather_columns.default, rows, group.communicator, columns)
    with graph.inserting_after(gathered):
        whole = call(graph, aten.reshape.default, gathered, [-1, sum(columns) // size, size])
    for user in before:
        user.replace_input_with(node, whole)


def _divide_linear(module: fx.GraphModule, group: RankGroup, node: Node) -> int:
    """Lets a rank compute its columns of a quantized layer, and gathers those of all.

    Panels of gate and up alternate in the weight of a gated layer.
    """
    size: int = _argument(node, "out_features")
    panels = _panels(size, group)
    if panels is None:
        return 0
    gated = is_op(node, armllm.int4_gated_linear.default)
    step, biases = (2, ("gate_bias", "up_bias")) if gated else (1, ("bias",))
    own = panels[group.rank]
    chosen = _columns(own, size)
    weight = _constant(module, node.args[1])[step * own.start : step * own.stop]
    _replace_weight(module, node, weight, len(chosen), [chosen], biases)
    residual = None if gated else _argument(node, "residual")
    if residual is not None:
        with module.graph.inserting_before(node):
            part = call(module.graph, aten.slice.Tensor, residual, -1, chosen.start, chosen.stop)
        node.update_arg(_place(node, "residual"), part)
    _gather(module, group, node, [len(_columns(each, size)) for each in panels])
    return 1


def _divide_experts(module: fx.GraphModule, group: RankGroup, node: Node) -> int:
    """Lets a rank compute columns of every expert's intermediate rows and of their results.

    Routing is uneven, so that whole experts would leave some ranks without work.
    """
    inner_size: int = _argument(node, "intermediate")
    outer_size = int(value(node).shape[-1])
    inner, outer = _panels(inner_size, group), _panels(outer_size, group)
    if inner is None or outer is None:
        return 0
    gated = _argument(node, "gated")
    step = 1 if gated is False else 2
    first, second = inner[group.rank], outer[group.rank]
    old = [str(node.args[place].target) for place in (3, 4)]
    gate_up, down = (_constant(module, node.args[place]) for place in (3, 4))
    parts = gate_up[:, step * first.start : step * first.stop], down[:, second.start : second.stop]
    for place, part in zip((3, 4), parts, strict=True):
        own = new_constant(module, node, f"{old[place - 3]}_rank", part.contiguous())
        node.update_arg(place, own)
    columns = [[len(_columns(each, n)) for each in p] for p, n in ((inner, inner_size), (outer, outer_size))]
    _set_arguments(node, communicator=group.communicator, inner_columns=columns[0], outer_columns=columns[1])
    drop_unused(module, *old)
    _gather(module, group, node, columns[1])
    return 1


def _set_arguments(node: Node, **values: Any) -> None:
    """Gives a node arguments that follow others with their defaults."""
    schema = node.target._schema.arguments
    args = [*node.args, *(argument.default_value for argument in schema[len(node.args) :])]
    for name, argument in values.items():
        args[_place(node, name)] = argument
    node.args = tuple(args)


def _panels(size: int, group: RankGroup) -> list[range] | None:
    """Returns the panels of each rank; None for a layer that every rank computes as a whole."""
    panels = -(-size // PANEL)
    return None if size < group.least_columns or panels < group.size else shares(panels, group.size)


def _columns(panels: range, size: int) -> range:
    return range(panels.start * PANEL, min(panels.stop * PANEL, size))


def _replace_weight(
    module: fx.GraphModule,
    node: Node,
    weight: Tensor,
    size: int,
    columns: Sequence[range],
    biases: Sequence[str] = ("bias",),
) -> None:
    """Gives a layer some rows of its weight, in memory of their own, and the same elements of its biases."""
    old = [str(node.args[1].target)]
    own = new_constant(module, node, f"{old[0]}_rank", weight.clone())
    node.update_arg(1, own)
    node.update_arg(2, size)
    for name in biases:
        bias = _argument(node, name)
        if bias is not None:
            whole = _constant(module, bias)
            part = torch.cat([whole[each.start : each.stop] for each in columns])
            old.append(str(bias.target))
            node.update_arg(_place(node, name), new_constant(module, node, f"{old[-1]}_rank", part))
    drop_unused(module, *old)


def _gather(module: fx.GraphModule, group: RankGroup, node: Node, columns: list[int]) -> None:
    users = list(node.users)
    recompute(node)
    with module.graph.inserting_after(node):
        whole = call(module.graph, armllm.gather_columns.default, node, group.communicator, columns)
    for user in users:
        user.replace_input_with(node, whole)


def _constant(module: fx.GraphModule, node: Any) -> Tensor:
    tensor = constant(module, node)
    assert tensor is not None, f"{node} is no constant"
    return tensor


def _place(node: Node, name: str) -> int:
    """Returns the place of an argument in the schema of a node's operator."""
    return [argument.name for argument in node.target._schema.arguments].index(name)


def _argument(node: Node, name: str) -> Any:
    place = _place(node, name)
    return node.args[place] if len(node.args) > place else None
