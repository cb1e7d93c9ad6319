"""The rotation of the rotary parts of queries and keys in latent attention, written in three ways."""

from __future__ import annotations

import operator
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import Node

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
from torch_armllm.passes.rope import Rotated, Tables, products, rotates_half


@dataclass(frozen=True)
class Turn:
    """A rotated tensor: what it was before, and by which angles it turned."""

    x: Node
    """``(1, heads, T, rope_size)``"""
    cos: Node
    """Cosines ``(1, T, rope_size)``, or the complex numbers ``(1, T, rope_size / 2)``."""
    sin: Node
    interleaved: bool
    unzip: bool

    @property
    def how(self) -> tuple[Any, ...]:
        """Everything but what is turned."""
        return self.cos, self.sin, self.interleaved, self.unzip


def _halves(node: Any) -> Turn | None:
    """``x·cos + rotate_half(x)·sin``."""
    factors = products(node, aten.add.Tensor)
    if not factors:
        return None
    x, cos, rotated, sin = factors
    if not isinstance(x, Node) or not rotates_half(rotated, x):
        return None
    if not is_op(cos, aten.unsqueeze.default) or not is_op(sin, aten.unsqueeze.default):
        return None
    return Turn(x, cos.args[0], sin.args[0], False, False)


def _every_other(node: Any, first: int) -> Any:
    """What ``node`` takes every other element of, from the ``first`` on."""
    if not is_op(node, aten.slice.Tensor) or tuple(node.args[1:]) != (3, first, sys.maxsize, 2):
        return None
    return node.args[0]


def _first_half(node: Any) -> Any:
    """``a`` of ``unsqueeze(a[..., :half], 1)``."""
    if not is_op(node, aten.unsqueeze.default) or not is_op(node.args[0], aten.slice.Tensor):
        return None
    whole, dim, begin, end, *step = node.args[0].args
    size = value(whole).shape[-1]
    return whole if dim in (2, -1) and begin == 0 and 2 * end == size and not step else None


def _unzipped(node: Any) -> Turn | None:
    """``cat([a·cos − b·sin, b·cos + a·sin])`` of the even and odd elements a and b."""
    if not is_op(node, aten.cat.default) or len(node.args[0]) != 2 or node.args[1:] not in ((-1,), (3,)):
        return None
    first, second = products(node.args[0][0], aten.sub.Tensor), products(node.args[0][1], aten.add.Tensor)
    if not first or not second:
        return None
    a, cos, b, sin = first
    x = _every_other(a, 0)
    if x is None or x is not _every_other(b, 1) or second != (b, cos, a, sin):
        return None
    angles = _first_half(cos), _first_half(sin)
    return None if None in angles else Turn(x, *angles, True, True)


def _complex(node: Any) -> Turn | None:
    """``view_as_real(view_as_complex(pairs of x) · turns)``."""
    node = strip(node, *CONVERSIONS, aten.flatten, aten.view, aten.reshape)
    if not is_op(node, aten.view_as_real.default) or not is_op(node.args[0], aten.mul.Tensor):
        return None
    pairs, turns = node.args[0].args[:2]
    if not is_op(pairs, aten.view_as_complex.default) or not is_op(pairs.args[0], aten.reshape, aten.view):
        return None
    x, turns = strip(pairs.args[0].args[0], *CONVERSIONS), strip(turns, aten.unsqueeze, *CONVERSIONS)
    if not isinstance(turns, Node) or value(x).dim() != 4 or value(pairs).dim() != 4:
        return None
    return Turn(x, turns, turns, True, False)


def match(node: Any) -> Turn | None:
    """How a tensor was rotated, or None."""
    return _halves(node) or _unzipped(node) or _complex(node)


def _of_complex(module: fx.GraphModule, turns: Node) -> tuple[Node, torch.Tensor, float] | None:
    """Positions, frequencies and scale of ``polar(1, positions · inv_freq) · scale``."""
    scale = 1.0
    if is_op(turns, aten.mul.Tensor) and isinstance(turns.args[1], float):
        turns, scale = turns.args[0], turns.args[1]  # type: ignore[assignment]
    if not is_op(turns, aten.polar.default) or not is_op(turns.args[0], aten.ones_like.default):
        return None
    angle: Any = turns.args[1]
    if not is_op(angle, aten.mul.Tensor):
        return None
    positions, frequencies = (strip(a, *CONVERSIONS, aten.unsqueeze) for a in angle.args[:2])
    found = constant(module, frequencies)
    if found is None or found.dim() != 1 or positions.op != "placeholder":
        return None
    return positions, found.float().contiguous(), scale


class TurnTables:
    """Angle tables of a graph, each made once."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self._tables = Tables(module)
        self._complex: dict[Node, tuple[Node, Node] | None] = {}

    def get(self, turn: Turn, before: Node) -> tuple[Node, Node] | None:
        """Cosines and sines of a rotation, ``(T, rope_size / 2)``; None where its angles are not known."""
        if turn.cos is not turn.sin:
            return self._tables.get(Rotated(turn.x, turn.cos, turn.sin), before)
        if turn.cos not in self._complex:
            self._complex[turn.cos] = self._make(turn.cos, before)
        return self._complex[turn.cos]

    def _make(self, turns: Node, before: Node) -> tuple[Node, Node] | None:
        angles = _of_complex(self.module, turns)
        if angles is None:
            return None
        positions, inv_freq, scale = angles
        frequencies = new_constant(self.module, before, "rope_inv_freq", inv_freq)
        graph = self.module.graph
        with graph.inserting_before(before):
            table = call(graph, torch.ops.armllm.rope_table.default, positions, frequencies, scale)
            return call(graph, operator.getitem, table, 0), call(graph, operator.getitem, table, 1)
