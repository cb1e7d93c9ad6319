"""Shards of results: the shards of its arguments that an operator needs for one, and the call that makes it.

A rule is a function of a node and of a shard of its result.  It returns None where the shard cannot be had
without the whole result.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.lora.block_columns import are_blocks
from torch_armllm.ops.linear.schemes import PANEL
from torch_armllm.ops.lora import BLOCK
from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.adapter_columns import add_to_columns
from torch_armllm.passes.lib.graph import CONVERSIONS, aten, call, constant, is_op, part_of, value
from torch_armllm.passes.lib.shards import Ranges, Shard, fills, sliced, through_view, union

armllm = torch.ops.armllm
QUANTIZED = (armllm.int4_linear.default, armllm.int8_linear.default)
VIEWS = (aten.view.default, aten.reshape.default)
_ALIGN: dict[Any, int] = {**dict.fromkeys(QUANTIZED, PANEL), armllm.lora_linear.default: BLOCK}
"""Columns of an operator that are computed together."""
_HEADS_LINEAR = (armllm.int8_heads_linear.default, armllm.dense_heads_linear.default)

Get = Callable[[Node, Shard], Node]
"""Returns the node that computes a shard of another node's result."""
Emit = Callable[[fx.GraphModule, Get], Node]
"""Inserts the call that computes a shard, at the graph's insertion point."""


@dataclass
class ResultShard:
    """A shard of a node's result.

    Attributes:
        sources: shards of the arguments that it needs; it needs other arguments as a whole.
        emit: inserts the call.
    """

    sources: dict[Node, Shard]
    emit: Emit


@dataclass
class ShardedCall:
    """The call of a node's operator with other arguments."""

    node: Node
    sources: dict[Node, Shard] = field(default_factory=dict)
    rows: dict[str, Ranges] = field(default_factory=dict)
    """Ranges of the first dimension of constants, by the name of the argument."""
    last: dict[str, Ranges] = field(default_factory=dict)
    """Likewise, of the last dimension."""
    others: dict[str, Any] = field(default_factory=dict)
    """New arguments that are no tensors."""

    def arguments(self, module: fx.GraphModule, get: Get) -> list[Any]:
        """Returns the arguments, of which shards are computed before the insertion point."""
        args: list[Any] = list(self.node.args)
        for place, arg in enumerate(args):
            if isinstance(arg, Node) and arg in self.sources:
                args[place] = get(arg, self.sources[arg])
            elif isinstance(arg, (list, tuple)) and any(
                a in self.sources for a in arg if isinstance(a, Node)
            ):
                args[place] = [get(a, self.sources[a]) if a in self.sources else a for a in arg]
        own = OpCall(self.node)
        for ranges, axis in ((self.rows, -1), (self.last, 0)):
            for name, chosen in ranges.items():
                whole = getattr(own, name)
                shape = value(whole).shape
                shard = Shard(axis % len(shape), shape[-1 - axis % len(shape)], chosen)
                args[own.place(name)] = constant_shard(module, self.node, whole, shard)
        return list(own.arguments(args, **self.others))

    def emit(self, module: fx.GraphModule, get: Get) -> Node:
        """Inserts the call at the graph's insertion point."""
        target: Any = self.node.target
        return call(module.graph, target, *self.arguments(module, get), **self.node.kwargs)

    @property
    def result(self) -> ResultShard:
        """The shard that the call returns."""
        return ResultShard(self.sources, self.emit)


def result_shard(node: Node, shard: Shard) -> ResultShard | None:
    """Returns how a shard of a node's result is computed; None if it needs the whole result."""
    if node.op != "call_function":
        return None
    if (rule := _RULES.get(node.target)) is not None:
        return rule(node, shard)
    target: Any = node.target
    if torch.Tag.pointwise in getattr(target, "tags", ()) or is_op(node, *CONVERSIONS):
        return _pointwise(node, shard)
    return None


def later_shard(node: Node, source: Node, shard: Shard) -> Shard | None:
    """Returns the shard of a result that depends on a shard of one of its arguments alone; else None."""
    shape = value(node).shape if isinstance(node.meta.get("val"), torch.Tensor) else None
    if shape is None:
        return None
    if is_op(node, *VIEWS):
        later = through_view(shard, value(source).shape, shape)
    elif is_op(node, aten.transpose.int):
        later = shard.on(_swapped(node, shard.axis))
    else:
        later = shard
    if later is None or len(shape) <= later.axis:
        return None
    result = result_shard(node, later)
    return later if result is not None and result.sources.get(source) == shard else None


def is_stateful(node: Node) -> bool:
    """True for an operator that writes into one of its arguments."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and bool(schema.is_mutable)


def constant_shard(module: fx.GraphModule, before: Node, node: Node, shard: Shard) -> Node:
    """Adds a shard of a constant to a module, and a node that reads it before another node."""
    tensor = constant(module, node)
    assert tensor is not None, f"{node} is no constant"
    whole = tensor
    part = (shard.axis, *(bound for each in shard.ranges for bound in each))
    return part_of(module, before, node, part, lambda: sliced(whole, shard))


def merged_shard(node: Node, shards: Sequence[Shard]) -> Shard | None:
    """Returns the shard that contains others of a node's result, and that its operator computes at once."""
    if any((shard.axis, shard.period) != (shards[0].axis, shards[0].period) for shard in shards):
        return None
    whole = union(shards, _ALIGN.get(node.target, 1))
    return whole if fills(whole, node) and whole.count < whole.period else None


def _pointwise(node: Node, shard: Shard) -> ResultShard | None:
    shape = value(node).shape
    sources = {}
    for each in node.all_input_nodes:
        if not isinstance(each.meta.get("val"), torch.Tensor):
            continue
        sizes = value(each).shape
        if len(sizes) <= shard.axis or sizes[-1 - shard.axis] == 1:
            continue
        if sizes[-1 - shard.axis] != shape[-1 - shard.axis]:
            return None
        sources[each] = shard
    return ShardedCall(node, sources).result


def _view(node: Node, shard: Shard) -> ResultShard | None:
    name = "size" if is_op(node, aten.view.default) else "shape"
    source, given, shape = OpCall(node).self, getattr(OpCall(node), name), value(node).shape
    before = through_view(shard, shape, value(source).shape)
    if before is None:
        return None
    sizes = list(given)
    place = len(sizes) - 1 - shard.axis
    if sizes[place] != -1:
        if shape[place] == shard.period:
            sizes[place] = shard.count
        elif -1 not in sizes:
            sizes[place] = -1
        else:
            return None
    return ShardedCall(node, {source: before}, others={name: sizes}).result


def _transpose(node: Node, shard: Shard) -> ResultShard:
    return ShardedCall(node, {OpCall(node).self: shard.on(_swapped(node, shard.axis))}).result


def _swapped(node: Node, axis: int) -> int:
    """Returns the axis of a transposition's argument that becomes an axis of its result."""
    dims = value(node).dim()
    swap = OpCall(node)
    pair = [dims - 1 - dim % dims for dim in (swap.dim0, swap.dim1)]
    return pair[1 - pair.index(axis)] if axis in pair else axis


def _squeezed(node: Node, shard: Shard) -> ResultShard | None:
    """Rule of operators that add or remove a dimension in front of a shard's."""
    source, dim = OpCall(node).self, OpCall(node).dim
    longer = max(value(node).dim(), value(source).dim())
    front = (dim % longer) + shard.axis < longer - 1
    return ShardedCall(node, {source: shard}).result if front else None


def _chosen(node: Node, shard: Shard) -> ResultShard | None:
    """Rule of slices, and of results of splits and chunks."""
    chosen = OpCall(node)
    if is_op(node, operator.getitem):
        split, index = chosen.source, chosen.index
        if not is_op(split, aten.split_with_sizes.default, aten.chunk.default):
            return None
        source, dim = OpCall(split).self, OpCall(split).dim
        sizes = [int(each.shape[dim]) for each in split.meta["val"]]
        begin, end = sum(sizes[:index]), sum(sizes[: index + 1])
    else:
        source, dim, begin, end = chosen.self, chosen.dim, chosen.start, chosen.end
        if not (isinstance(begin, int) and isinstance(end, int) and chosen.step == 1):
            return None
    axis = value(source).dim() - 1 - dim % value(source).dim()
    if axis != shard.axis:

        def emit(module: fx.GraphModule, get: Get) -> Node:
            return call(module.graph, aten.slice.Tensor, get(source, shard), -1 - axis, begin, end)

        return ResultShard({source: shard}, emit)
    size = value(source).shape[-1 - axis]
    if not fills(shard, node) or not isinstance(size, int) or begin < 0:
        return None
    own = Shard(axis, size, tuple((begin + b, begin + e) for b, e in shard.ranges))
    return ResultShard({source: own}, lambda module, get: get(source, own))


def _cat(node: Node, shard: Shard) -> ResultShard | None:
    inputs, dim = OpCall(node).tensors, OpCall(node).dim
    dims = value(node).dim()
    axis = dims - 1 - dim % dims
    if axis != shard.axis:
        return ShardedCall(node, dict.fromkeys(inputs, shard)).result
    if not fills(shard, node) or len(set(inputs)) != len(inputs):
        return None
    sources, at = {}, 0
    for each in inputs:
        size = int(value(each).shape[-1 - axis])
        own = tuple((max(b, at) - at, min(e, at + size) - at) for b, e in shard.ranges)
        own = tuple((b, e) for b, e in own if b < e)
        if own:
            sources[each] = Shard(axis, size, own)
        at += size

    def emit(module: fx.GraphModule, get: Get) -> Node:
        shards = [get(each, chosen) for each, chosen in sources.items()]
        return shards[0] if len(shards) == 1 else call(module.graph, aten.cat.default, shards, -1 - axis)

    return ResultShard(sources, emit)


def _rms_norm(node: Node, shard: Shard) -> ResultShard | None:
    norm = OpCall(node)
    if shard.axis < value(norm.weight).dim():
        return None
    return ShardedCall(node, {norm.x: shard}).result


def _linear(node: Node, shard: Shard) -> ResultShard | None:
    """Rule of linear layers, whose packed weights can be cut between panels."""
    if shard.axis != 0 or not fills(shard, node):
        return None
    linear = OpCall(node)
    weight, bias = linear.weight, linear.bias
    packed = is_op(node, *QUANTIZED)
    panel = PANEL if packed else 1
    whole_panels = all(b % panel == 0 and (e % panel == 0 or e == shard.period) for b, e in shard.ranges)
    if not whole_panels or weight.op != "get_attr":
        return None
    made = ShardedCall(node, {}, {"weight": tuple((b // panel, -(-e // panel)) for b, e in shard.ranges)})
    if packed:
        made.others["out_features"] = shard.count
        if linear.residual is not None:
            made.sources[linear.residual] = shard
    if bias is not None:
        if bias.op != "get_attr":
            return None
        made.last["bias"] = shard.ranges
    return made.result


def _lora_linear(node: Node, shard: Shard) -> ResultShard | None:
    """Rule of adapters' additions: a rank has the second factors of its columns, in whole blocks."""
    base = OpCall(node).base
    if shard.axis != 0 or not fills(shard, node) or not are_blocks(shard.ranges):
        return None

    def emit(module: fx.GraphModule, get: Get) -> Node:
        return add_to_columns(module, node, get(base, shard), shard.ranges)

    return ResultShard({base: shard}, emit)


def _heads_linear(node: Node, shard: Shard) -> ResultShard | None:
    heads = OpCall(node)
    if shard.axis != 1 or not fills(shard, node) or heads.weight.op != "get_attr":
        return None
    return ShardedCall(node, {heads.x: shard}, {"weight": shard.ranges}).result


def _mla_attention(node: Node, shard: Shard) -> ResultShard | None:
    attention = OpCall(node)
    if shard.axis != 1 or not fills(shard, node):
        return None
    rows = {} if attention.sinks is None else {"sinks": shard.ranges}
    return ShardedCall(node, {attention.q_latent: shard, attention.q_rope: shard}, rows).result


def _causal_conv(node: Node, shard: Shard) -> ResultShard | None:
    conv = OpCall(node)
    if shard.axis != 0 or not fills(shard, node):
        return None
    last = {name: shard.ranges for name in ("weight", "bias") if conv.gives(name)}
    return ShardedCall(node, {conv.x: shard}, last=last).result


def _selective_scan(node: Node, shard: Shard) -> ResultShard | None:
    scan = OpCall(node)
    if shard.axis != 0 or not fills(shard, node):
        return None
    return ShardedCall(node, {scan.x: shard, scan.dt: shard}, last={"a": shard.ranges}).result


_RULES: dict[Any, Callable[[Node, Shard], ResultShard | None]] = {
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys((*QUANTIZED, armllm.dense_linear.default), _linear),
    armllm.lora_linear.default: _lora_linear,
    **dict.fromkeys(_HEADS_LINEAR, _heads_linear),
    **dict.fromkeys((aten.select.int, aten.unsqueeze.default, aten.squeeze.dim), _squeezed),
    **dict.fromkeys((operator.getitem, aten.slice.Tensor), _chosen),
    aten.transpose.int: _transpose,
    aten.cat.default: _cat,
    armllm.rms_norm.default: _rms_norm,
    armllm.gated_act.default: _pointwise,
    armllm.mla_attention.default: _mla_attention,
    armllm.causal_conv.default: _causal_conv,
    armllm.selective_scan.default: _selective_scan,
}
