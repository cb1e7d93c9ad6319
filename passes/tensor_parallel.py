"""Tensor parallelism: each rank computes some output columns of the quantized layers, and some heads.

A rank's columns are gathered behind each layer, so that every rank has all activations, with the bits that
one rank alone computes: no sum is divided.  Of experts each rank has columns of all, or some whole ones.
Attention whose heads can be shared out needs no exchange between its projections and its result, and a
rank's KV cache holds its own heads only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.ops.linear.packed_layout import PANEL
from torch_armllm.ops.lora import BLOCK
from torch_armllm.parallel.rank_group import RankGroup, shares
from torch_armllm.passes.lib.adapter_columns import add_to_columns
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import (
    aten,
    call,
    constant,
    drop_unused,
    is_op,
    new_constant,
    only_user,
    recompute,
    value,
)
from torch_armllm.passes.lib.head_division import HeadDivision
from torch_armllm.passes.lib.partial_results import QUANTIZED, argument, argument_place

armllm = torch.ops.armllm


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Shares out attention heads and the columns of quantized layers; does nothing without a group.

    `PassContext.key_heads` says how many heads the rank's KV cache has.

    Returns:
        The number of layers that are shared out.
    """
    group = context.group
    if group is None:
        return 0
    heads = HeadDivision(module, group)
    context.key_heads = heads.key_heads
    divided = heads.run()
    layers = [n for n in module.graph.nodes if n not in divided]
    count = len(heads.owners)
    for node in layers:
        if is_op(node, *QUANTIZED, armllm.int4_gated_linear.default):
            count += _divide_linear(module, group, node)
        elif is_op(node, armllm.int4_moe.default):
            count += (_share_out_experts if group.whole_experts else _divide_experts)(module, group, node)
    module.graph.eliminate_dead_code()
    return count


def _divide_linear(module: fx.GraphModule, group: RankGroup, node: Node) -> int:
    """Lets a rank compute its columns of a quantized layer, and gathers those of all.

    Panels of gate and up alternate in the weight of a gated layer.  Adapters are added to a rank's columns,
    which are then whole blocks of their factors; those of the columns of a merged layer to what is gathered.
    """
    size: int = argument(node, "out_features")
    user = only_user(node)
    adapted = user if is_op(user, armllm.lora_linear.default) and user.args[0] is node else None
    panels = _panels(size, group, 1 if adapted is None else BLOCK // PANEL)
    if panels is None:
        return 0
    gated = is_op(node, armllm.int4_gated_linear.default)
    step, biases = (2, ("gate_bias", "up_bias")) if gated else (1, ("bias",))
    own = panels[group.rank]
    chosen = _columns(own, size)
    weight = _constant(module, node.args[1])[step * own.start : step * own.stop]
    _replace_weight(module, node, weight, len(chosen), [chosen], biases)
    residual = None if gated else argument(node, "residual")
    if residual is not None:
        with module.graph.inserting_before(node):
            part = call(module.graph, aten.slice.Tensor, residual, -1, chosen.start, chosen.stop)
        node.update_arg(argument_place(node, "residual"), part)
    if adapted is not None:
        recompute(node)
        node = _add_to_own(module, adapted, node, chosen)
    _gather(module, group, node, [len(_columns(each, size)) for each in panels])
    return 1


def _add_to_own(module: fx.GraphModule, adapted: Node, own: Node, columns: range) -> Node:
    """Lets adapters be added to a rank's columns; returns the node that does so."""
    with module.graph.inserting_before(adapted):
        added = add_to_columns(module, adapted, own, ((columns.start, columns.stop),))
    adapted.replace_all_uses_with(added)
    factors = str(adapted.args[3].target)  # type: ignore[union-attr]
    module.graph.erase_node(adapted)
    drop_unused(module, factors)
    return added


def _divide_experts(module: fx.GraphModule, group: RankGroup, node: Node) -> int:
    """Lets a rank compute columns of every expert's intermediate rows and of their results.

    Routing is uneven, so that whole experts would leave some ranks without work.
    """
    inner_size: int = argument(node, "intermediate")
    outer_size = int(value(node).shape[-1])
    inner, outer = _panels(inner_size, group), _panels(outer_size, group)
    if inner is None or outer is None:
        return 0
    gated = argument(node, "gated")
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


def _share_out_experts(module: fx.GraphModule, group: RankGroup, node: Node) -> int:
    """Lets a rank compute some whole experts; the op itself exchanges their results."""
    old = [str(node.args[place].target) for place in (3, 4)]
    weights = [_constant(module, node.args[place]) for place in (3, 4)]
    experts = len(weights[0])
    if experts < group.size:
        raise ValueError(
            f"enable_expert_parallel: a layer has {experts} experts, and there are {group.size} ranks: give "
            f"tensor_parallel_size = {experts} at most, or leave enable_expert_parallel out"
        )
    own = group.share(experts)
    for place, name, weight in zip((3, 4), old, weights, strict=True):
        node.update_arg(
            place, new_constant(module, node, f"{name}_rank", weight[own.start : own.stop].clone())
        )
    counts = [len(part) for part in shares(experts, group.size)]
    _set_arguments(node, communicator=group.communicator, rank_experts=counts)
    drop_unused(module, *old)
    return 1


def _set_arguments(node: Node, **values: Any) -> None:
    """Gives a node arguments that follow others with their defaults."""
    schema = node.target._schema.arguments
    args = [*node.args, *(each.default_value for each in schema[len(node.args) :])]
    for name, given in values.items():
        args[argument_place(node, name)] = given
    node.args = tuple(args)


def _panels(size: int, group: RankGroup, unit: int = 1) -> list[range] | None:
    """Returns the panels of each rank; None for a layer that every rank computes as a whole.

    Args:
        size: columns of the layer.
        group: the ranks.
        unit: panels that stay together.
    """
    panels = -(-size // PANEL)
    units = -(-panels // unit)
    if size < group.least_columns or units < group.size:
        return None
    return [range(unit * part.start, min(unit * part.stop, panels)) for part in shares(units, group.size)]


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
        bias = argument(node, name)
        if bias is not None:
            whole = _constant(module, bias)
            part = torch.cat([whole[each.start : each.stop] for each in columns])
            old.append(str(bias.target))
            node.update_arg(argument_place(node, name), new_constant(module, node, f"{old[-1]}_rank", part))
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
