"""Tensor parallelism: each rank computes some output columns of the quantized layers, and some heads.

A rank's columns are gathered behind each layer, so that every rank has all activations, with the bits that
one rank alone computes: no sum is divided.  Of experts each rank has columns of all, or some whole ones.
Attention whose heads can be sharded needs no exchange between its projections and its result, and a
rank's KV cache holds its own heads only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.ops.linear.schemes import PANEL
from torch_armllm.ops.lora import BLOCK
from torch_armllm.ops.op_call import OpCall
from torch_armllm.parallel.rank_group import RankGroup, shares
from torch_armllm.passes.lib.adapter_columns import add_to_columns
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import (
    aten,
    call,
    constant,
    drop_unused,
    is_op,
    match,
    only_user,
    part_of,
    recompute,
    value,
)
from torch_armllm.passes.lib.head_sharding import HeadSharding
from torch_armllm.passes.lib.result_shards import QUANTIZED

armllm = torch.ops.armllm


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Shards attention heads and the columns of quantized layers; does nothing without a group.

    `PassContext.key_heads` says how many heads the rank's KV cache has.
    """
    group = context.group
    if group is None:
        return 0
    heads = HeadSharding(module, group)
    context.key_heads = heads.key_heads
    sharded = heads.apply()
    layers = [n for n in module.graph.nodes if n not in sharded]
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
    size: int = OpCall(node).out_features
    added = match(only_user(node), armllm.lora_linear.default)
    adapted = added.node if added is not None and added.base is node else None
    panels = _panels(size, group, 1 if adapted is None else BLOCK // PANEL)
    if panels is None:
        return 0
    gated = is_op(node, armllm.int4_gated_linear.default)
    step, biases = (2, ("gate_bias", "up_bias")) if gated else (1, ("bias",))
    own = panels[group.rank]
    chosen = _columns(own, size)
    _replace_weight(module, node, range(step * own.start, step * own.stop), chosen, biases)
    residual = None if gated else OpCall(node).residual
    if residual is not None:
        with module.graph.inserting_before(node):
            shard = call(module.graph, aten.slice.Tensor, residual, -1, chosen.start, chosen.stop)
        OpCall(node).replace(residual=shard)
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
    factors = str(OpCall(adapted).b.target)
    module.graph.erase_node(adapted)
    drop_unused(module, factors)
    return added


def _divide_experts(module: fx.GraphModule, group: RankGroup, node: Node) -> int:
    """Lets a rank compute columns of every expert's intermediate rows and of their results.

    Routing is uneven, so that whole experts would leave some ranks without work.
    """
    experts = OpCall(node)
    inner_size: int = experts.intermediate
    outer_size = int(value(node).shape[-1])
    inner, outer = _panels(inner_size, group), _panels(outer_size, group)
    if inner is None or outer is None:
        return 0
    step = 2 if experts.gated else 1
    first, second = inner[group.rank], outer[group.rank]
    panels = range(step * first.start, step * first.stop)
    old = _replace_experts(module, node, 1, (panels, second))
    columns = [[len(_columns(each, n)) for each in p] for p, n in ((inner, inner_size), (outer, outer_size))]
    experts.replace(communicator=group.communicator, inner_columns=columns[0], outer_columns=columns[1])
    drop_unused(module, *old)
    _gather(module, group, node, columns[1])
    return 1


def _share_out_experts(module: fx.GraphModule, group: RankGroup, node: Node) -> int:
    """Lets a rank compute some whole experts; the op itself exchanges their results."""
    experts = len(_constant(module, OpCall(node).gate_up))
    if experts < group.size:
        raise ValueError(
            f"enable_expert_parallel: a layer has {experts} experts, and there are {group.size} ranks: give "
            f"tensor_parallel_size = {experts} at most, or leave enable_expert_parallel out"
        )
    own = group.share(experts)
    old = _replace_experts(module, node, 0, (own, own))
    counts = [len(shard) for shard in shares(experts, group.size)]
    OpCall(node).replace(communicator=group.communicator, rank_experts=counts)
    drop_unused(module, *old)
    return 1


def _replace_experts(module: fx.GraphModule, node: Node, dim: int, rows: tuple[range, range]) -> list[str]:
    """Gives a layer of experts some entries of a dimension of its weights, and returns the weights' names."""
    experts = OpCall(node)
    old = experts.gate_up, experts.down
    gate_up, down = (_rows_of(module, node, x, each, dim) for x, each in zip(old, rows, strict=True))
    experts.replace(gate_up=gate_up, down=down)
    return [str(each.target) for each in old]


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
    return [range(unit * shard.start, min(unit * shard.stop, panels)) for shard in shares(units, group.size)]


def _columns(panels: range, size: int) -> range:
    return range(panels.start * PANEL, min(panels.stop * PANEL, size))


def _replace_weight(
    module: fx.GraphModule,
    node: Node,
    panels: range,
    columns: range,
    biases: Sequence[str],
) -> None:
    """Gives a layer some panels of its weight, in memory of their own, and some elements of its biases."""
    layer = OpCall(node)
    old = [layer.weight, *(bias for name in biases if (bias := getattr(layer, name)) is not None)]
    layer.replace(weight=_rows_of(module, node, layer.weight, panels), out_features=len(columns))
    for name in biases:
        if (bias := getattr(layer, name)) is not None:
            layer.replace(**{name: _rows_of(module, node, bias, columns)})
    drop_unused(module, *(str(each.target) for each in old))


def _rows_of(module: fx.GraphModule, before: Node, node: Node, rows: range, dim: int = 0) -> Node:
    """Adds some entries of a constant's dimension, in memory of their own."""
    some = _constant(module, node).narrow(dim, rows.start, len(rows))
    part = dim, rows.start, rows.stop
    return part_of(module, before, node, part, lambda: some.clone(memory_format=torch.contiguous_format))


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
