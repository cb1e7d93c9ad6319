"""Pattern matching of rotary embeddings, and their angle tables."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.graph import (
    CONVERSIONS,
    aten,
    call,
    constant,
    is_op,
    match,
    new_constant,
    strip,
    value,
)
from torch_armllm.passes.lib.known_values import known_value
from torch_armllm.passes.lib.rope_probe import Rotation
from torch_armllm.passes.lib.rope_tables import TabledRotation


@dataclass
class RopeMatch:
    """A matched rotation: its input and its angles."""

    x: Node
    """Before rotation, ``(1, T, heads, head_size)``."""
    cos: Node
    sin: Node
    halved: bool = False
    """True if cos and sin hold each angle once instead of twice."""


def is_rotate_half(node: Any, x: Node) -> bool:
    """True if ``node`` is ``cat([-x[..., h:], x[..., :h]])``."""
    parts = joined_parts(node)
    if len(parts) != 2:
        return False
    half = value(x).shape[-1] // 2
    negated, first = match(parts[0], aten.neg.default), match(parts[1], aten.slice.Tensor, start=0, end=half)
    second = match(negated.self, aten.slice.Tensor, start=half) if negated is not None else None
    return first is not None and second is not None and first.self is x and second.self is x


def joined_parts(node: Any) -> list[Any]:
    """Returns what a concatenation joins; empty for other nodes."""
    return list(OpCall(node).tensors) if is_op(node, aten.cat.default) else []


def joins_last_dim(node: Any) -> bool:
    """True if a node joins elements of heads, which are the last of four dimensions."""
    return is_op(node, aten.cat.default) and OpCall(node).dim in (-1, 3)


def product_factors(node: Any, op: Any) -> tuple[Any, ...]:
    """Returns the four factors of ``a·b ± c·d``; empty if the node has another form."""
    both = match(node, op)
    sides = () if both is None else (match(both.self, aten.mul.Tensor), match(both.other, aten.mul.Tensor))
    products = [side for side in sides if side is not None]
    return tuple(x for each in products for x in (each.self, each.other)) if len(products) == 2 else ()


def _match_halves(node: Any) -> RopeMatch | None:
    """Matches ``cat([a·cos − b·sin, b·cos + a·sin])`` of the halves a and b, as in gpt-oss."""
    factors = rotated_halves(node)
    if factors is None:
        return None
    a, b, cos, sin = factors
    first, second = match(a, operator.getitem, index=0), match(b, operator.getitem, index=1)
    if first is None or second is None or first.source is not second.source:
        return None
    halves = match(first.source, aten.chunk.default, chunks=2)
    x = match(halves.self, aten.transpose.int, dim0=1, dim1=2) if halves and halves.dim in (-1, 3) else None
    if x is None or not (is_op(cos, aten.unsqueeze.default) and is_op(sin, aten.unsqueeze.default)):
        return None
    return RopeMatch(x.self, OpCall(cos).self, OpCall(sin).self, halved=True)


def rotated_halves(node: Any) -> tuple[Any, Any, Any, Any] | None:
    """Returns a, b, cos and sin of ``cat([a·cos − b·sin, b·cos + a·sin])``; None for any other node."""
    parts = joined_parts(node)
    if len(parts) != 2 or not joins_last_dim(node):
        return None
    first = product_factors(parts[0], aten.sub.Tensor)
    if not first:
        return None
    a, cos, b, sin = first
    same = product_factors(parts[1], aten.add.Tensor) == (b, cos, a, sin)
    return (a, b, cos, sin) if same else None


def match_rope(node: Any) -> RopeMatch | None:
    """Matches ``x·cos + rotate_half(x)·sin`` or its form on halves; None if neither fits."""
    if not is_op(node, aten.add.Tensor):
        return _match_halves(node)
    factors = product_factors(node, aten.add.Tensor)
    for x, cos, rotated, sin in (factors, factors[2:] + factors[:2]) if factors else ():
        swapped = match(x, aten.transpose.int, dim0=1, dim1=2)
        if swapped is None or not is_rotate_half(rotated, x):
            continue
        if is_op(cos, aten.unsqueeze.default) and is_op(sin, aten.unsqueeze.default):
            return RopeMatch(swapped.self, OpCall(cos).self, OpCall(sin).self)
    return None


@dataclass
class _RopeAngles:
    positions: Node
    inv_freq: torch.Tensor
    scaling: float


def _once(node: Any) -> tuple[Any, bool]:
    """Returns x of ``cat([x, x])`` and True; any other node and False."""
    parts = joined_parts(node)
    twice = len(parts) == 2 and parts[0] is parts[1]
    return (parts[0], True) if twice else (node, False)


def _angle_factors(angle: Any) -> tuple[Any, Any] | None:
    """Returns positions and frequencies of ``f``, a product by element or that of a column and a row."""
    if is_op(angle, aten.mul.Tensor):
        return OpCall(angle).self, OpCall(angle).other
    swapped = match(angle, aten.transpose.int, dim0=1, dim1=2)
    product = None if swapped is None else match(swapped.self, aten.matmul.default)
    if product is None or value(product.self).shape[-1] != 1:
        return None
    return product.other, product.self


def _match_angles(module: fx.GraphModule, cos: Node, sin: Node, halved: bool) -> _RopeAngles | None:
    """Matches ``cos(cat([f, f])) · s`` with ``f = positions · inv_freq``; likewise sin.

    The product may be one of matrices, as in code that comes with a model.  The halves may also be joined
    after the cosine, or, if the angles are halved, never.
    """
    angles = []
    for node, function in ((cos, aten.cos.default), (sin, aten.sin.default)):
        node, joined = _once(strip(node, *CONVERSIONS))
        node, scaling = strip(node, *CONVERSIONS), 1.0
        if is_op(node, aten.mul.Tensor) and isinstance(OpCall(node).other, float):
            node, scaling = OpCall(node).self, OpCall(node).other
        if not is_op(node, function):
            return None
        angle, joined_before = _once(OpCall(node).self)
        if joined + joined_before != (0 if halved else 1):
            return None
        angles.append((angle, scaling))
    if angles[0] != angles[1]:
        return None
    angle, scaling = angles[0]
    factors = _angle_factors(angle)
    if factors is None:
        return None
    positions, frequencies = (strip(a, *CONVERSIONS, aten.unsqueeze, aten.expand, aten.view) for a in factors)
    inv_freq = known_value(module, frequencies)
    if (
        inv_freq is None
        or inv_freq.numel() != max(inv_freq.shape)
        or not isinstance(positions, Node)
        or positions.op != "placeholder"
    ):
        return None
    return _RopeAngles(positions, inv_freq.float().flatten(), scaling)


class RopeTables:
    """Angle tables of a graph, each inserted once, before its first use."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self._tables: dict[Any, tuple[Node, Node]] = {}

    def knows(self, match: RopeMatch) -> bool:
        """True if the angles of a rotation are products of positions and constant frequencies."""
        return _match_angles(self.module, match.cos, match.sin, match.halved) is not None

    def get(self, match: RopeMatch, before: Node) -> tuple[Node, Node]:
        """Returns cosines and sines of a rotation, float32 ``(T, half)``."""
        if (match.cos, match.sin) not in self._tables:
            self._tables[match.cos, match.sin] = self._make(match.cos, match.sin, match.halved, before)
        return self._tables[match.cos, match.sin]

    def _make(self, cos: Node, sin: Node, halved: bool, before: Node) -> tuple[Node, Node]:
        graph = self.module.graph
        angles = _match_angles(self.module, cos, sin, halved)
        if angles is None:
            half = value(cos).shape[-1] // (1 if halved else 2)
            with graph.inserting_before(before):
                return self._half(cos, half), self._half(sin, half)
        return self._table(angles, before)

    def get_probed(self, rotation: Rotation | TabledRotation, before: Node) -> tuple[Node, Node]:
        """Returns the table of a probed rotation, whose frequencies or whose angles are constants."""
        if isinstance(rotation, TabledRotation):
            return self._get_tabled(rotation, before)
        key = (rotation.inv_freq, rotation.scaling, rotation.backwards)
        if key not in self._tables:
            inv_freq = constant(self.module, rotation.inv_freq)
            positions = [n for n in self.module.graph.nodes if n.name == "position_ids"]
            assert inv_freq is not None and positions
            frequencies = inv_freq.float().flatten().contiguous() * (-1.0 if rotation.backwards else 1.0)
            angles = _RopeAngles(positions[0], frequencies, rotation.scaling)
            self._tables[key] = self._table(angles, before)
        return self._tables[key]

    def _get_tabled(self, rotation: TabledRotation, before: Node) -> tuple[Node, Node]:
        """Looks up the cosines and sines of each token; layers with equal tables share the look-up."""
        if rotation in self._tables:
            return self._tables[rotation]
        graph = self.module.graph
        positions = next(n for n in graph.nodes if n.name == "position_ids")
        rows = []
        for name, table in (("rope_cos", rotation.cos), ("rope_sin", rotation.sin)):
            weight = new_constant(self.module, before, name, table)
            with graph.inserting_before(before):
                looked_up = call(graph, aten.embedding.default, weight, positions)
                rows.append(call(graph, aten.select.int, looked_up, 0, 0))
        self._tables[rotation] = (rows[0], rows[1])
        return self._tables[rotation]

    def _table(self, angles: _RopeAngles, before: Node) -> tuple[Node, Node]:
        graph = self.module.graph
        frequencies = new_constant(self.module, before, "rope_inv_freq", angles.inv_freq)
        with graph.inserting_before(before):
            table = call(
                graph, torch.ops.armllm.rope_table.default, angles.positions, frequencies, angles.scaling
            )
            return call(graph, operator.getitem, table, 0), call(graph, operator.getitem, table, 1)

    def _half(self, angle: Node, half: int) -> Node:
        graph = self.module.graph
        part = call(graph, aten.slice.Tensor, angle, -1, 0, half)
        wide = call(graph, aten.to.dtype, part, torch.float32)
        rows = call(graph, aten.reshape.default, wide, [-1, half])
        return call(graph, aten.contiguous.default, rows)
