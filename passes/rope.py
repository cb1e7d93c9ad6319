"""Rotary embeddings of queries and keys: ``x·cos + rotate_half(x)·sin`` becomes the in-place op ``rope_``."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import (
    CONVERSIONS,
    aten,
    call,
    constant,
    is_op,
    new_constant,
    strip,
    value,
)
from torch_armllm.passes.lib.rope_probe import Rotation, Rotations


@dataclass
class Rotated:
    """What a rotation turned, and by which angles."""

    x: Node
    """Before rotation, ``(1, T, heads, head_size)``."""
    cos: Node
    sin: Node
    halved: bool = False
    """Whether cos and sin hold each angle once, not twice."""


def rotates_half(node: Any, x: Node) -> bool:
    """Whether ``node`` is ``cat([-x[..., h:], x[..., :h]])``."""
    if not is_op(node, aten.cat.default) or len(node.args[0]) != 2:
        return False
    negated, first = node.args[0]
    half = value(x).shape[-1] // 2
    if not (is_op(negated, aten.neg.default) and is_op(first, aten.slice.Tensor)):
        return False
    second = negated.args[0]
    return (
        is_op(second, aten.slice.Tensor)
        and second.args[0] is x
        and first.args[0] is x
        and second.args[2] == half
        and first.args[2] == 0
        and first.args[3] == half
    )


def products(node: Any, op: Any) -> tuple[Any, ...]:
    """The four factors of ``a·b ± c·d``."""
    if not is_op(node, op) or not all(is_op(side, aten.mul.Tensor) for side in node.args[:2]):
        return ()
    return (*node.args[0].args[:2], *node.args[1].args[:2])


def _match_halves(node: Any) -> Rotated | None:
    """``cat([a·cos − b·sin, b·cos + a·sin])`` of the halves a and b: gpt-oss."""
    if not is_op(node, aten.cat.default) or len(node.args[0]) != 2 or node.args[1:] not in ((-1,), (3,)):
        return None
    first, second = products(node.args[0][0], aten.sub.Tensor), products(node.args[0][1], aten.add.Tensor)
    if not first or not second:
        return None
    a, cos, b, sin = first
    if second != (b, cos, a, sin) or not (is_op(a, operator.getitem) and is_op(b, operator.getitem)):
        return None
    halves: Any = a.args[0]
    if b.args[0] is not halves or (a.args[1], b.args[1]) != (0, 1):
        return None
    if not is_op(halves, aten.chunk.default) or halves.args[1:] not in ((2, -1), (2, 3)):
        return None
    x = halves.args[0]
    if not is_op(x, aten.transpose.int) or x.args[1:] != (1, 2):
        return None
    if not (is_op(cos, aten.unsqueeze.default) and is_op(sin, aten.unsqueeze.default)):
        return None
    return Rotated(x.args[0], cos.args[0], sin.args[0], halved=True)


def _match(node: Any) -> Rotated | None:
    if not is_op(node, aten.add.Tensor):
        return _match_halves(node)
    for straight, turned in (node.args[:2], node.args[1::-1]):
        if not (is_op(straight, aten.mul.Tensor) and is_op(turned, aten.mul.Tensor)):
            continue
        x, cos = straight.args[:2]
        rotated, sin = turned.args[:2]
        if not rotates_half(rotated, x) or not is_op(x, aten.transpose.int) or x.args[1:] != (1, 2):
            continue
        if is_op(cos, aten.unsqueeze.default) and is_op(sin, aten.unsqueeze.default):
            return Rotated(x.args[0], cos.args[0], sin.args[0])
    return None


def _is_private(side: Rotated, rotated: Any) -> bool:
    """Whether nothing but the rotation reads x, and nothing but attention reads the result."""
    return len(side.x.users) == 1 and _only_attended(rotated)


def _only_attended(rotated: Any) -> bool:
    return all(is_op(user, torch.ops.armllm.attention.default) for user in rotated.users)


@dataclass
class _Angles:
    positions: Node
    inv_freq: torch.Tensor
    scaling: float


def _match_angles(module: fx.GraphModule, cos: Node, sin: Node, halved: bool) -> _Angles | None:
    """``cos(cat([f, f])) · s`` (or of f alone) with ``f = positions · inv_freq``, and the same for sin."""
    found = []
    for node, function in ((cos, aten.cos.default), (sin, aten.sin.default)):
        node, scaling = strip(node, *CONVERSIONS), 1.0
        if is_op(node, aten.mul.Tensor) and isinstance(node.args[1], float):
            node, scaling = node.args[0], node.args[1]
        if not is_op(node, function) or is_op(node.args[0], aten.cat.default) == halved:
            return None
        found.append((node.args[0], scaling))
    if found[0] != found[1]:
        return None
    angle, scaling = found[0]
    if not halved:
        if len(angle.args[0]) != 2 or angle.args[0][0] is not angle.args[0][1]:
            return None
        angle = angle.args[0][0]
    if not is_op(angle, aten.mul.Tensor):
        return None
    positions, frequencies = (
        strip(a, *CONVERSIONS, aten.unsqueeze, aten.expand, aten.view) for a in angle.args[:2]
    )
    inv_freq = constant(module, frequencies)
    if (
        inv_freq is None
        or inv_freq.dim() != 1
        or not isinstance(positions, Node)
        or positions.op != "placeholder"
    ):
        return None
    return _Angles(positions, inv_freq.float().contiguous(), scaling)


class Tables:
    """Angle tables of a graph, each made once, at the place of its first use."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.made: dict[Any, tuple[Node, Node]] = {}

    def get(self, of: Rotated, before: Node) -> tuple[Node, Node]:
        """Cosines and sines of a rotation, float32 ``(T, half)``."""
        if (of.cos, of.sin) not in self.made:
            self.made[of.cos, of.sin] = self._make(of.cos, of.sin, of.halved, before)
        return self.made[of.cos, of.sin]

    def _make(self, cos: Node, sin: Node, halved: bool, before: Node) -> tuple[Node, Node]:
        graph = self.module.graph
        angles = _match_angles(self.module, cos, sin, halved)
        if angles is None:
            half = value(cos).shape[-1] // (1 if halved else 2)
            with graph.inserting_before(before):
                return self._half(cos, half), self._half(sin, half)
        return self._table(angles, before)

    def get_probed(self, rotation: Rotation, before: Node) -> tuple[Node, Node]:
        """The table of a rotation whose frequencies are a constant."""
        key = (rotation.inv_freq, rotation.scaling)
        if key not in self.made:
            inv_freq = constant(self.module, rotation.inv_freq)
            positions = [n for n in self.module.graph.nodes if n.name == "position_ids"]
            assert inv_freq is not None and positions
            angles = _Angles(positions[0], inv_freq.float().flatten().contiguous(), rotation.scaling)
            self.made[key] = self._table(angles, before)
        return self.made[key]

    def _table(self, angles: _Angles, before: Node) -> tuple[Node, Node]:
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


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Rewrites the rotation of every attention's queries and keys.

    The rotation is done in place: queries and keys are results of a linear layer or a norm, and nothing else
    reads them.  Where something does, the attention is left alone.  Keys that several attentions read are
    turned by the first of them.  Rotations that are spelled in another way are found by
    `torch_armllm.passes.lib.rope_probe`.

    Returns:
        The number of attentions rewritten.
    """
    graph = module.graph
    finder = _Finder(module)
    found = 0
    for node in list(graph.nodes):
        if is_op(node, torch.ops.armllm.attention.default):
            found += finder.rewrite(node)
    graph.eliminate_dead_code()
    return found


@dataclass
class _Side:
    """Queries or keys that are turned by a table, as the op turns them."""

    x: Node
    table: Any
    make_table: Callable[[], tuple[Node, Node]]
    layout: tuple[bool, ...] = (False,)


class _Finder:
    """Rewrites the attentions of one graph, in order."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.graph = module.graph
        self.tables = Tables(module)
        self.rotations = Rotations(module)
        self.turned: set[Node] = set()
        """Queries and keys that a rotation in place has turned."""

    def _spelt(self, operand: Any, before: Node) -> _Side | None:
        found = _match(operand)
        if found is None or not _is_private(found, operand):
            return None
        return _Side(found.x, (found.cos, found.sin), lambda: self.tables.get(found, before))

    def _probed(self, operand: Any, before: Node) -> _Side | None:
        found = self.rotations.find(operand) if _only_attended(operand) else None
        if found is None:
            return None
        x, how = found
        return _Side(x, how, lambda: self.tables.get_probed(how, before), (how.interleaved, how.unzip))

    def rewrite(self, node: Node) -> bool:
        """Turns what one attention reads by the op; False: its operands are not rotations that are known."""
        q, k = node.args[:2]
        if q in self.turned:  # by an attention to the same keys
            return True
        for find in (self._spelt, self._probed):
            queries = find(q, node)
            if queries is not None and k in self.turned:
                self._turn(node, queries, None)
                return True
            keys = find(k, node) if k not in self.turned else None
            if queries is not None and keys is not None and queries.table == keys.table:
                self._turn(node, queries, keys)
                return True
        return False

    def _turn(self, node: Node, q: _Side, k: _Side | None) -> None:
        table = q.make_table()
        graph = self.graph
        with graph.inserting_before(node):
            keys = call(graph, aten.slice.Tensor, q.x, 2, 0, 0) if k is None else k.x
            call(graph, torch.ops.armllm.rope_.default, q.x, keys, *table, *q.layout)
            for position, side in ((0, q), (1, k)):
                if side is not None:
                    turned = call(graph, aten.transpose.int, side.x, 1, 2)
                    node.args[position].replace_all_uses_with(turned)  # type: ignore[union-attr]
                    self.turned.add(turned)
