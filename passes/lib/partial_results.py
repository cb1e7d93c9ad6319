"""Parts of results: the parts of its arguments that an operator needs for one, and the call that makes it.

A rule is a function of a node and of a part of its result.  It returns None where the part cannot be had
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
from torch_armllm.passes.lib.graph import CONVERSIONS, aten, call, constant, is_op, new_constant, value
from torch_armllm.passes.lib.parts import Part, Ranges, fills, sliced, through_view, union

armllm = torch.ops.armllm
QUANTIZED = (armllm.int4_linear.default, armllm.int8_linear.default)
VIEWS = (aten.view.default, aten.reshape.default)
_ALIGN: dict[Any, int] = {**dict.fromkeys(QUANTIZED, PANEL), armllm.lora_linear.default: BLOCK}
"""Columns of an operator that are computed together."""
_HEADS_LINEAR = (armllm.int8_heads_linear.default, armllm.dense_heads_linear.default)

Get = Callable[[Node, Part], Node]
"""Returns the node that computes a part of another node's result."""
Emit = Callable[[fx.GraphModule, Get], Node]
"""Inserts the call that computes a part, at the graph's insertion point."""


@dataclass
class PartialResult:
    """A part of a node's result.

    Attributes:
        sources: parts of the arguments that it needs; it needs other arguments as a whole.
        emit: inserts the call.
    """

    sources: dict[Node, Part]
    emit: Emit


@dataclass
class Call:
    """The call of a node's operator with other arguments."""

    node: Node
    sources: dict[Node, Part] = field(default_factory=dict)
    rows: dict[str, Ranges] = field(default_factory=dict)
    """Ranges of the first dimension of constants, by the name of the argument."""
    last: dict[str, Ranges] = field(default_factory=dict)
    """Likewise, of the last dimension."""
    others: dict[str, Any] = field(default_factory=dict)
    """New arguments that are no tensors."""

    def arguments(self, module: fx.GraphModule, get: Get) -> list[Any]:
        """Returns the arguments, of which parts are computed before the insertion point."""
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
                part = Part(axis % len(shape), shape[-1 - axis % len(shape)], chosen)
                args[own.place(name)] = constant_part(module, self.node, whole, part)
        return list(own.arguments(args, **self.others))

    def emit(self, module: fx.GraphModule, get: Get) -> Node:
        """Inserts the call at the graph's insertion point."""
        target: Any = self.node.target
        return call(module.graph, target, *self.arguments(module, get), **self.node.kwargs)

    @property
    def result(self) -> PartialResult:
        """The part that the call returns."""
        return PartialResult(self.sources, self.emit)


def partial_result(node: Node, part: Part) -> PartialResult | None:
    """Returns how a part of a node's result is computed; None if it needs the whole result."""
    if node.op != "call_function":
        return None
    if (rule := _RULES.get(node.target)) is not None:
        return rule(node, part)
    target: Any = node.target
    if torch.Tag.pointwise in getattr(target, "tags", ()) or is_op(node, *CONVERSIONS):
        return _pointwise(node, part)
    return None


def later_part(node: Node, source: Node, part: Part) -> Part | None:
    """Returns the part of a node's result that depends on a part of one of its arguments alone; else None."""
    shape = value(node).shape if isinstance(node.meta.get("val"), torch.Tensor) else None
    if shape is None:
        return None
    if is_op(node, *VIEWS):
        later = through_view(part, value(source).shape, shape)
    elif is_op(node, aten.transpose.int):
        later = part.on(_swapped(node, part.axis))
    else:
        later = part
    if later is None or len(shape) <= later.axis:
        return None
    result = partial_result(node, later)
    return later if result is not None and result.sources.get(source) == part else None


def is_stateful(node: Node) -> bool:
    """True for an operator that writes into one of its arguments."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and bool(schema.is_mutable)


def constant_part(module: fx.GraphModule, before: Node, node: Node, part: Part) -> Node:
    """Adds a part of a constant to a module, and a node that reads it before another node."""
    tensor = constant(module, node)
    assert tensor is not None, f"{node} is no constant"
    return new_constant(module, before, f"{node.target}_rank", sliced(tensor, part))


def merged_part(node: Node, parts: Sequence[Part]) -> Part | None:
    """Returns the part that contains others of a node's result, and that its operator computes at once."""
    if any((part.axis, part.period) != (parts[0].axis, parts[0].period) for part in parts):
        return None
    whole = union(parts, _ALIGN.get(node.target, 1))
    return whole if fills(whole, node) and whole.count < whole.period else None


def _pointwise(node: Node, part: Part) -> PartialResult | None:
    shape = value(node).shape
    sources = {}
    for each in node.all_input_nodes:
        if not isinstance(each.meta.get("val"), torch.Tensor):
            continue
        sizes = value(each).shape
        if len(sizes) <= part.axis or sizes[-1 - part.axis] == 1:
            continue
        if sizes[-1 - part.axis] != shape[-1 - part.axis]:
            return None
        sources[each] = part
    return Call(node, sources).result


def _view(node: Node, part: Part) -> PartialResult | None:
    name = "size" if is_op(node, aten.view.default) else "shape"
    source, given, shape = OpCall(node).self, getattr(OpCall(node), name), value(node).shape
    before = through_view(part, shape, value(source).shape)
    if before is None:
        return None
    sizes = list(given)
    place = len(sizes) - 1 - part.axis
    if sizes[place] != -1:
        if shape[place] == part.period:
            sizes[place] = part.count
        elif -1 not in sizes:
            sizes[place] = -1
        else:
            return None
    return Call(node, {source: before}, others={name: sizes}).result


def _transpose(node: Node, part: Part) -> PartialResult:
    return Call(node, {OpCall(node).self: part.on(_swapped(node, part.axis))}).result


def _swapped(node: Node, axis: int) -> int:
    """Returns the axis of a transposition's argument that becomes an axis of its result."""
    dims = value(node).dim()
    swap = OpCall(node)
    pair = [dims - 1 - dim % dims for dim in (swap.dim0, swap.dim1)]
    return pair[1 - pair.index(axis)] if axis in pair else axis


def _squeezed(node: Node, part: Part) -> PartialResult | None:
    """Rule of operators that add or remove a dimension in front of a part's."""
    source, dim = OpCall(node).self, OpCall(node).dim
    longer = max(value(node).dim(), value(source).dim())
    front = (dim % longer) + part.axis < longer - 1
    return Call(node, {source: part}).result if front else None


def _chosen(node: Node, part: Part) -> PartialResult | None:
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
    if axis != part.axis:

        def emit(module: fx.GraphModule, get: Get) -> Node:
            return call(module.graph, aten.slice.Tensor, get(source, part), -1 - axis, begin, end)

        return PartialResult({source: part}, emit)
    size = value(source).shape[-1 - axis]
    if not fills(part, node) or not isinstance(size, int) or begin < 0:
        return None
    own = Part(axis, size, tuple((begin + b, begin + e) for b, e in part.ranges))
    return PartialResult({source: own}, lambda module, get: get(source, own))


def _cat(node: Node, part: Part) -> PartialResult | None:
    inputs, dim = OpCall(node).tensors, OpCall(node).dim
    dims = value(node).dim()
    axis = dims - 1 - dim % dims
    if axis != part.axis:
        return Call(node, dict.fromkeys(inputs, part)).result
    if not fills(part, node) or len(set(inputs)) != len(inputs):
        return None
    sources, at = {}, 0
    for each in inputs:
        size = int(value(each).shape[-1 - axis])
        own = tuple((max(b, at) - at, min(e, at + size) - at) for b, e in part.ranges)
        own = tuple((b, e) for b, e in own if b < e)
        if own:
            sources[each] = Part(axis, size, own)
        at += size

    def emit(module: fx.GraphModule, get: Get) -> Node:
        parts = [get(each, chosen) for each, chosen in sources.items()]
        return parts[0] if len(parts) == 1 else call(module.graph, aten.cat.default, parts, -1 - axis)

    return PartialResult(sources, emit)


def _rms_norm(node: Node, part: Part) -> PartialResult | None:
    norm = OpCall(node)
    if part.axis < value(norm.weight).dim():
        return None
    return Call(node, {norm.x: part}).result


def _linear(node: Node, part: Part) -> PartialResult | None:
    """Rule of linear layers, whose packed weights can be cut between panels."""
    if part.axis != 0 or not fills(part, node):
        return None
    linear = OpCall(node)
    weight, bias = linear.weight, linear.bias
    packed = is_op(node, *QUANTIZED)
    panel = PANEL if packed else 1
    if any(b % panel or (e % panel and e != part.period) for b, e in part.ranges) or weight.op != "get_attr":
        return None
    made = Call(node, {}, {"weight": tuple((b // panel, -(-e // panel)) for b, e in part.ranges)})
    if packed:
        made.others["out_features"] = part.count
        if linear.residual is not None:
            made.sources[linear.residual] = part
    if bias is not None:
        if bias.op != "get_attr":
            return None
        made.last["bias"] = part.ranges
    return made.result


def _lora_linear(node: Node, part: Part) -> PartialResult | None:
    """Rule of adapters' additions: a rank has the second factors of its columns, in whole blocks."""
    base = OpCall(node).base
    if part.axis != 0 or not fills(part, node) or not are_blocks(part.ranges):
        return None

    def emit(module: fx.GraphModule, get: Get) -> Node:
        return add_to_columns(module, node, get(base, part), part.ranges)

    return PartialResult({base: part}, emit)


def _heads_linear(node: Node, part: Part) -> PartialResult | None:
    heads = OpCall(node)
    if part.axis != 1 or not fills(part, node) or heads.weight.op != "get_attr":
        return None
    return Call(node, {heads.x: part}, {"weight": part.ranges}).result


def _mla_attention(node: Node, part: Part) -> PartialResult | None:
    attention = OpCall(node)
    if part.axis != 1 or not fills(part, node):
        return None
    rows = {} if attention.sinks is None else {"sinks": part.ranges}
    return Call(node, {attention.q_latent: part, attention.q_rope: part}, rows).result


def _causal_conv(node: Node, part: Part) -> PartialResult | None:
    conv = OpCall(node)
    if part.axis != 0 or not fills(part, node):
        return None
    last = {name: part.ranges for name in ("weight", "bias") if conv.gives(name)}
    return Call(node, {conv.x: part}, last=last).result


def _selective_scan(node: Node, part: Part) -> PartialResult | None:
    scan = OpCall(node)
    if part.axis != 0 or not fills(part, node):
        return None
    return Call(node, {scan.x: part, scan.dt: part}, last={"a": part.ranges}).result


_RULES: dict[Any, Callable[[Node, Part], PartialResult | None]] = {
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
