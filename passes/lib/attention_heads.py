"""The projections of attention layers to queries, keys and values, whose heads ranks can share out."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.passes.lib.graph import aten, is_op, value

armllm = torch.ops.armllm
PROJECTIONS = (armllm.int4_linear.default, armllm.int8_linear.default)
_SINKS, _SLOPES = 10, 13
"""Arguments of ``paged_attention`` with one number for each query head."""
_UNDIVIDED = (14, 15, 17)
"""Arguments whose heads are not divided: relative positions, their profiles, and biases."""


class Projection(NamedTuple):
    """Columns of a linear layer that become the heads of an attention's queries, keys or values.

    Attributes:
        nodes: from the view that makes heads of columns to the argument of attention.
        part: the layer's result, or the slice of it.
        layer: the linear layer.
        heads, width: number and size of the heads.
        attention: numbers of heads of queries and of keys of the attention that reads them.
        is_query: False for keys and values.
    """

    nodes: tuple[Node, ...]
    part: Node
    layer: Node
    heads: int
    width: int
    attention: tuple[int, int]
    is_query: bool

    @property
    def begin(self) -> int:
        """First column in the layer's result."""
        begin: Any = 0 if self.part is self.layer else self.part.args[2]
        return int(begin)


class AttentionHeads(NamedTuple):
    """Attention layers and all of their projections.

    Attributes:
        attentions: calls of ``paged_attention``.
        projections: of all of them.
        heads: numbers of heads of queries and of keys, of each attention.
    """

    attentions: list[Node]
    projections: list[Projection]
    heads: list[tuple[int, int]]


def attention_heads(module: fx.GraphModule) -> AttentionHeads | None:
    """Returns the attention layers of a rewritten graph; None if the heads of some cannot be divided.

    Between a linear layer and attention, each head may be normalized and rotated; anything else, or another
    reader, keeps the heads together.
    """
    attentions = [n for n in module.graph.nodes if is_op(n, armllm.paged_attention.default)]
    writes = {_cache_of(n, 2): n for n in module.graph.nodes if is_op(n, armllm.kv_write.default)}
    if not _alone({*attentions, *writes.values()}):
        return None
    projections: dict[Node, Projection] = {}
    heads: list[tuple[int, int]] = []
    for node in attentions:
        written = writes.get(_cache_of(node, 1))
        if written is None or any(len(node.args) > i and node.args[i] is not None for i in _UNDIVIDED):
            return None
        keys, values = written.args[:2]
        both = value(node.args[0]).shape[-2], value(keys).shape[-2]
        found = [_trace(node.args[0], both, True), _trace(keys, both, False), _trace(values, both, False)]
        if any(each is None for each in found):
            return None
        projections.update({each.nodes[-1]: each for each in found if each is not None})
        heads.append(both)
    every = list(projections.values())
    if not every or not _closed(every, {*attentions, *writes.values()}):
        return None
    return AttentionHeads(attentions, every, heads)


def per_head_arguments(attention: Node) -> list[int]:
    """Returns the places of an attention's arguments that have one number for each query head."""
    return [i for i in (_SINKS, _SLOPES) if len(attention.args) > i and attention.args[i] is not None]


def _cache_of(node: Node, place: int) -> Any:
    """Returns the tensor and the layer of the cache that a call reads or writes its keys."""
    layer = node.args[place]
    return tuple(layer.args) if is_op(layer, aten.select.int) else None


def _alone(ends: set[Node]) -> bool:
    """True if no other operator reads a cache of theirs."""
    caches = {x for node in ends for x in node.args if is_op(x, aten.select.int)}
    inputs = {x.args[0] for x in caches if x.args[0].op == "placeholder"}
    return all(
        user in ends or not is_op(reader, aten.select.int)
        for source in inputs
        for reader in source.users
        for user in reader.users
    )


def _trace(node: Any, attention: tuple[int, int], is_query: bool) -> Projection | None:
    nodes: list[Node] = []
    while isinstance(node, Node):
        nodes.append(node)
        without_batch = is_op(node, aten.select.int) and tuple(node.args[1:]) == (0, 0)
        if without_batch or (_is_head_norm(node)):
            node = node.args[0]
        elif is_op(node, aten.view.default, aten.reshape.default):
            return _projection(nodes, attention, is_query)
        else:
            return None
    return None


def _is_head_norm(node: Any) -> bool:
    return is_op(node, armllm.rms_norm.default) and value(node.args[1]).dim() == 1


def _projection(nodes: list[Node], attention: tuple[int, int], is_query: bool) -> Projection | None:
    part: Any = nodes[-1].args[0]
    view = nodes[-1]
    before, after = value(part), value(view)
    if before.dim() + 1 != after.dim() or before.shape[-1] != after.shape[-2] * after.shape[-1]:
        return None
    sliced = is_op(part, aten.slice.Tensor) and part.args[1] in (-1, before.dim() - 1)
    layer: Any = part.args[0] if sliced else part
    if not is_op(layer, *PROJECTIONS) or residual_of(layer) is not None:
        return None
    heads, width = int(after.shape[-2]), int(after.shape[-1])
    return Projection(tuple(reversed(nodes)), part, layer, heads, width, attention, is_query)


def residual_of(layer: Node) -> Any:
    """Returns what a quantized linear layer adds to its result; None if nothing."""
    place = 5 if is_op(layer, armllm.int4_linear.default) else 4
    return layer.args[place] if len(layer.args) > place else None


def _closed(projections: list[Projection], ends: set[Node]) -> bool:
    """True if nothing but attention reads the projections."""
    inside = ends | {node for each in projections for node in each.nodes}
    parts = {each.part for each in projections}
    for each in projections:
        if each.part is not each.layer and any(user not in parts for user in each.layer.users):
            return False
        if len(each.part.users) != 1:
            return False
        for node in each.nodes:
            if any(user not in inside and not is_op(user, armllm.rope_.default) for user in node.users):
                return False
    return True
