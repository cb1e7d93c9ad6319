"""Pattern matching of the rotary embeddings of latent attention (MLA), in three decompositions."""

from __future__ import annotations

import operator
import sys
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
from torch_armllm.passes.lib.rope_match import (
    RopeMatch,
    RopeTables,
    is_rotate_half,
    product_factors,
    rotated_halves,
)


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
    return MlaRotation(x, OpCall(cos).self, OpCall(sin).self, False, False)


def _every_other(node: Any, first: int) -> Any:
    """Matches a slice of every other element from ``first`` on; returns its source."""
    part = match(node, aten.slice.Tensor, dim=3, start=first, end=sys.maxsize, step=2)
    return None if part is None else part.self


def _first_half(node: Any) -> Any:
    """Matches ``unsqueeze(a[..., :half], 1)``; returns a."""
    row = match(node, aten.unsqueeze.default)
    part = None if row is None else match(row.self, aten.slice.Tensor, start=0, step=1)
    if part is None or part.dim not in (2, -1) or 2 * part.end != value(part.self).shape[-1]:
        return None
    return part.self


def _unzipped(node: Any) -> MlaRotation | None:
    """Matches ``cat([a·cos − b·sin, b·cos + a·sin])`` of the even and odd elements a and b."""
    factors = rotated_halves(node)
    if factors is None:
        return None
    a, b, cos, sin = factors
    x = _every_other(a, 0)
    if x is None or x is not _every_other(b, 1):
        return None
    angles = _first_half(cos), _first_half(sin)
    return None if None in angles else MlaRotation(x, *angles, True, True)


def _complex(node: Any) -> MlaRotation | None:
    """Matches ``view_as_real(view_as_complex(pairs of x) · polar)``."""
    node = strip(node, *CONVERSIONS, aten.flatten, aten.view, aten.reshape)
    real = match(node, aten.view_as_real.default)
    product = None if real is None else match(real.self, aten.mul.Tensor)
    pairs = None if product is None else match(product.self, aten.view_as_complex.default)
    view = None if pairs is None else match(pairs.self, aten.reshape, aten.view)
    if product is None or view is None:
        return None
    x, polar = strip(view.self, *CONVERSIONS), strip(product.other, aten.unsqueeze, *CONVERSIONS)
    if not isinstance(polar, Node) or value(x).dim() != 4 or value(product.self).dim() != 4:
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
    if is_op(polar, aten.mul.Tensor) and isinstance(OpCall(polar).other, float):
        polar, scale = OpCall(polar).self, OpCall(polar).other
    found = match(polar, aten.polar.default)
    angle = None if found is None else match(found.angle, aten.mul.Tensor)
    if found is None or angle is None or not is_op(found.abs, aten.ones_like.default):
        return None
    positions, frequencies = (strip(a, *CONVERSIONS, aten.unsqueeze) for a in (angle.self, angle.other))
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
