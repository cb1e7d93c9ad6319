"""Pattern matching of the rotary embeddings of latent attention (MLA), in three decompositions."""

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
from torch_armllm.passes.lib.rope_match import RopeMatch, RopeTables, is_rotate_half, product_factors


@dataclass(frozen=True)
class MlaRotation:
    """A matched rotation: its input, its angles and the layout of its pairs."""

    x: Node
    """``(1, heads, T, rope_size)``"""
    cos: Node
    """Cosines ``(1, T, rope_size)``, or the complex numbers ``(1, T, rope_size / 2)``."""
    sin: Node
    interleaved: bool
    unzip: bool

    @property
    def angles(self) -> tuple[Any, ...]:
        """Returns everything but the input."""
        return self.cos, self.sin, self.interleaved, self.unzip


def _halves(node: Any) -> MlaRotation | None:
    """Matches ``x·cos + rotate_half(x)·sin``."""
    factors = product_factors(node, aten.add.Tensor)
    if not factors:
        return None
    x, cos, rotated, sin = factors
    if not isinstance(x, Node) or not is_rotate_half(rotated, x):
        return None
    if not is_op(cos, aten.unsqueeze.default) or not is_op(sin, aten.unsqueeze.default):
        return None
    return MlaRotation(x, cos.args[0], sin.args[0], False, False)


def _every_other(node: Any, first: int) -> Any:
    """Matches a slice of every other element from ``first`` on; returns its source."""
    if not is_op(node, aten.slice.Tensor) or tuple(node.args[1:]) != (3, first, sys.maxsize, 2):
        return None
    return node.args[0]


def _first_half(node: Any) -> Any:
    """Matches ``unsqueeze(a[..., :half], 1)``; returns a."""
    if not is_op(node, aten.unsqueeze.default) or not is_op(node.args[0], aten.slice.Tensor):
        return None
    source, dim, begin, end, *step = node.args[0].args
    size = value(source).shape[-1]
    return source if dim in (2, -1) and begin == 0 and 2 * end == size and not step else None


def _unzipped(node: Any) -> MlaRotation | None:
    """Matches ``cat([a·cos − b·sin, b·cos + a·sin])`` of the even and odd elements a and b."""
    if not is_op(node, aten.cat.default) or len(node.args[0]) != 2 or node.args[1:] not in ((-1,), (3,)):
        return None
    first, second = (
        product_factors(node.args[0][0], aten.sub.Tensor),
        product_factors(node.args[0][1], aten.add.Tensor),
    )
    if not first or not second:
        return None
    a, cos, b, sin = first
    x = _every_other(a, 0)
    if x is None or x is not _every_other(b, 1) or second != (b, cos, a, sin):
        return None
    angles = _first_half(cos), _first_half(sin)
    return None if None in angles else MlaRotation(x, *angles, True, True)


def _complex(node: Any) -> MlaRotation | None:
    """Matches ``view_as_real(view_as_complex(pairs of x) · polar)``."""
    node = strip(node, *CONVERSIONS, aten.flatten, aten.view, aten.reshape)
    if not is_op(node, aten.view_as_real.default) or not is_op(node.args[0], aten.mul.Tensor):
        return None
    pairs, polar = node.args[0].args[:2]
    if not is_op(pairs, aten.view_as_complex.default) or not is_op(pairs.args[0], aten.reshape, aten.view):
        return None
    x, polar = strip(pairs.args[0].args[0], *CONVERSIONS), strip(polar, aten.unsqueeze, *CONVERSIONS)
    if not isinstance(polar, Node) or value(x).dim() != 4 or value(pairs).dim() != 4:
        return None
    return MlaRotation(x, polar, polar, True, False)


def match_rotation(node: Any) -> MlaRotation | None:
    """Returns the rotation that computed a tensor; None if none matches.

    Angles in float32 make a rotated tensor float32, which models convert back to the dtype of the input.
    """
    source = strip(node, *CONVERSIONS)
    return _halves(source) or _unzipped(source) or _complex(node)


def _polar_angles(module: fx.GraphModule, polar: Node) -> tuple[Node, torch.Tensor, float] | None:
    """Matches ``polar(1, positions · inv_freq) · scale``; returns positions, frequencies and scale."""
    scale = 1.0
    if is_op(polar, aten.mul.Tensor) and isinstance(polar.args[1], float):
        polar, scale = polar.args[0], polar.args[1]  # type: ignore[assignment]
    if not is_op(polar, aten.polar.default) or not is_op(polar.args[0], aten.ones_like.default):
        return None
    angle: Any = polar.args[1]
    if not is_op(angle, aten.mul.Tensor):
        return None
    positions, frequencies = (strip(a, *CONVERSIONS, aten.unsqueeze) for a in angle.args[:2])
    inv_freq = constant(module, frequencies)
    if inv_freq is None or inv_freq.dim() != 1 or positions.op != "placeholder":
        return None
    return positions, inv_freq.float().contiguous(), scale


class MlaRopeTables:
    """Angle tables of a graph, each inserted once."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self._tables = RopeTables(module)
        self._complex: dict[Node, tuple[Node, Node] | None] = {}

    def get(self, rotation: MlaRotation, before: Node) -> tuple[Node, Node] | None:
        """Returns cosines and sines ``(T, rope_size / 2)`` of a rotation; None if its angles do not match."""
        if rotation.cos is not rotation.sin:
            return self._tables.get(RopeMatch(rotation.x, rotation.cos, rotation.sin), before)
        if rotation.cos not in self._complex:
            self._complex[rotation.cos] = self._make(rotation.cos, before)
        return self._complex[rotation.cos]

    def _make(self, polar: Node, before: Node) -> tuple[Node, Node] | None:
        angles = _polar_angles(self.module, polar)
        if angles is None:
            return None
        positions, inv_freq, scale = angles
        frequencies = new_constant(self.module, before, "rope_inv_freq", inv_freq)
        graph = self.module.graph
        with graph.inserting_before(before):
            table = call(graph, torch.ops.armllm.rope_table.default, positions, frequencies, scale)
            return call(graph, operator.getitem, table, 0), call(graph, operator.getitem, table, 1)
