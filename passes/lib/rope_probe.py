"""Probing of rotary embeddings: rotations are recognized by their results, in any decomposition."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.capture.probing import as_float32, compute, is_size, number
from torch_armllm.ops.rope import reference_rope, reference_rope_table
from torch_armllm.passes.lib.graph import aten, constant, is_op, value
from torch_armllm.passes.lib.rope_tables import TabledRotation, read_table

MAX_NODES = 60
_POSITIONS = (0, 1, 2, 3, 7, 33, 130, 511)
_FAR = (5_000, 20_000, 100_003, 600_011)
"""Positions at which models may scale heads; angles are too inexact there to be compared, lengths are not."""
_TOLERANCE = 2e-2
"""Relative tolerance; bfloat16 models round their cosines to 8 bits."""
_AXES = 2
"""Parts of heads that turn by a row and a column."""


@dataclass(frozen=True)
class Rotation:
    """Parameters of a rotation of heads by their tokens' positions.

    Attributes:
        inv_freq: the constant that holds each pair's frequency.
        scaling: factor of the rotated dimensions.
        interleaved, unzip: as in `torch_armllm.ops.rope.rope_`.
        backwards: True if later positions are turned by negative angles.
        parts: equal parts of a head, in each of which the first half forms pairs with the second, as where
            one turns by a row and another by a column; frequencies are those of one part after another.
    """

    inv_freq: Node
    scaling: float
    interleaved: bool
    unzip: bool
    backwards: bool = False
    parts: int = 1


class RotationFinder:
    """Finds rotations in one graph; equal regions are probed once."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self._order = {node: i for i, node in enumerate(module.graph.nodes)}
        self._positional = self._depends_on_positions()
        self._positions = torch.tensor(_POSITIONS)
        self._sampled: dict[Node, Any] = {}
        self._rotations: dict[Any, Rotation | TabledRotation | None] = {}

    def find(
        self, heads: Node, by_token: bool = False, entry_by_token: bool = True
    ) -> tuple[Node, Rotation | TabledRotation] | None:
        """Returns the input ``(1, T, n, size)`` and the rotation that yield heads.

        Args:
            heads: rotated, ``(1, n, T, size)``.
            by_token: True if they are ``(1, T, n, size)``.
            entry_by_token: False if the input has the shape ``(1, n, T, size)``.
        """
        region = self._region(heads, by_token == entry_by_token)
        if region is None:
            return None
        entry, nodes = region
        layout = (by_token, entry_by_token)
        key = (layout, self._signature(entry, nodes))
        if key not in self._rotations:
            self._rotations[key] = self._probe(heads, layout, entry, nodes)
        rotation = self._rotations[key]
        return None if rotation is None else (entry, rotation)

    def _depends_on_positions(self) -> set[Node]:
        """Returns the nodes that depend on positions and constants only."""
        positional: set[Node] = set()
        for node in self.module.graph.nodes:
            if node.op == "placeholder" and node.name == "position_ids":
                positional.add(node)
            elif node.op == "call_function" and isinstance(node.meta.get("val"), (Tensor, tuple, list)):
                inputs = [n for n in node.all_input_nodes if n.op != "get_attr" and not is_size(n)]
                # Without a token dimension, a node depends on the longest sequence (dynamic frequencies).
                if inputs and _has_token_dim(node) and all(n in positional for n in inputs):
                    positional.add(node)
        return positional

    def _region(self, heads: Node, same_layout: bool) -> tuple[Node, list[Node]] | None:
        """Returns the single input of ``heads``, and the nodes between them."""
        first, second, size = value(heads).shape[1:]
        entry_shape = (1, first, second, size) if same_layout else (1, second, first, size)
        nodes: set[Node] = set()
        pending = {heads}
        has_rotation = False
        while pending and len(nodes) < MAX_NODES:
            last = max(pending, key=self._order.__getitem__)
            result = last.meta.get("val")
            if (
                has_rotation
                and len(pending) == 1
                and isinstance(result, Tensor)
                and tuple(result.shape) == entry_shape
            ):
                if all(user in nodes for user in last.users):
                    return last, sorted(nodes, key=self._order.__getitem__)
                return None
            pending.remove(last)
            if last.op != "call_function" or not _is_plain(last):
                return None
            nodes.add(last)
            for source in last.all_input_nodes:
                if source in self._positional:
                    has_rotation = True
                elif source.op != "get_attr" and not is_size(source):
                    pending.add(source)
        return None

    def _signature(self, entry: Node, nodes: list[Node]) -> Any:
        number_of = {node: i for i, node in enumerate([entry, *nodes])}

        def name(node: Node) -> Any:
            return number_of.get(node, node.name)

        return tuple(
            (str(n.target), repr(fx.map_arg(n.args, name)), repr(fx.map_arg(n.kwargs, name))) for n in nodes
        )

    def _sample(self, node: Node) -> Any:
        """Evaluates a node that depends on positions only, at the sample positions."""
        if node not in self._sampled:
            if node.op == "placeholder":
                self._sampled[node] = self._positions[None]
            else:
                self._sampled[node] = self._run(node, {})
        return self._sampled[node]

    def _run(self, node: Node, values: dict[Node, Any]) -> Any:
        def read(source: Node) -> Any:
            if source in values:
                return values[source]
            if source in self._positional:
                return self._sample(source)
            tensor = constant(self.module, source)
            if tensor is not None:
                return as_float32(tensor)
            return number(source.meta["val"], len(self._positions))

        return compute(node, read)

    def _probe(
        self, heads: Node, layout: tuple[bool, bool], entry: Node, nodes: list[Node]
    ) -> Rotation | TabledRotation | None:
        by_token, entry_by_token = layout
        count, size = value(entry).shape[2 if entry_by_token else 1], value(entry).shape[-1]

        def rotate(x: Tensor, positions: Tensor) -> Tensor:
            if not torch.equal(positions, self._positions):
                self._positions, self._sampled = positions, {}
            values: dict[Node, Any] = {entry: (x if entry_by_token else x.transpose(1, 2)).clone()}
            for node in nodes:
                values[node] = self._run(node, values)
            result: Tensor = values[heads]
            return result if by_token else result.transpose(1, 2)

        angles = self._angles(nodes)
        tables = [t for n in angles for s in n.all_input_nodes if (t := constant(self.module, s)) is not None]
        length = max([0, *(max(t.shape, default=0) for t in tables)])
        positions = torch.tensor([p for p in _POSITIONS if p < length] if length > int(size) else _POSITIONS)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(1, len(positions), int(count), int(size), generator=generator)
        try:
            rotated = rotate(x, positions)
            if length > int(size):
                return read_table(rotate, x, positions, length)
        except Exception:  # noqa: BLE001 - a region that cannot run on a few tokens is no rotation
            return None
        factors = {a for n in angles if is_op(n, aten.mul.Tensor) for a in n.args if isinstance(a, float)}
        for candidate in self._frequencies(angles, int(size) // 2):
            rotation = _fit_rotation(self.module, x, rotated, candidate, factors | {1.0})
            if rotation is not None:
                return rotation if self._keeps_lengths(rotate, rotation, x[:, : len(_FAR)]) else None
        return None

    def _keeps_lengths(
        self, rotate: Callable[[Tensor, Tensor], Tensor], rotation: Rotation, x: Tensor
    ) -> bool:
        """True if the lengths of heads do not depend on the position, as where later ones are scaled."""
        frequencies = constant(self.module, rotation.inv_freq)
        assert frequencies is not None
        rotary = 2 * frequencies.numel()
        found = rotate(x, torch.tensor(_FAR))[..., :rotary].norm(dim=-1)
        expected = rotation.scaling * x[..., :rotary].norm(dim=-1)
        return bool(((found - expected).abs() <= _TOLERANCE * expected).all())

    def _angles(self, nodes: list[Node]) -> list[Node]:
        """Returns the nodes that compute a region's angles."""
        visited: dict[Node, None] = {}
        pending = [s for n in nodes for s in n.all_input_nodes if s in self._positional]
        while pending:
            node = pending.pop()
            if node not in visited:
                visited[node] = None
                pending += [s for s in node.all_input_nodes if constant(self.module, s) is None]
        return list(visited)

    def _frequencies(self, angles: list[Node], max_numel: int) -> Iterable[Node]:
        """Yields constants that the angles depend on, which may be frequencies."""
        for node in dict.fromkeys(s for n in angles for s in n.all_input_nodes):
            tensor = constant(self.module, node)
            if tensor is not None and tensor.is_floating_point() and 0 < tensor.numel() <= max_numel:
                yield node


def _fit_rotation(
    module: fx.GraphModule, x: Tensor, rotated: Tensor, frequencies: Node, factors: set[float]
) -> Rotation | None:
    """Returns the rotation by these frequencies that maps ``x`` to ``rotated``; None if there is none."""
    tensor = constant(module, frequencies)
    assert tensor is not None
    inv_freq = tensor.float().flatten()
    rotary = 2 * inv_freq.numel()
    positions = torch.tensor(_POSITIONS)
    # a rotation keeps lengths, so they show the scaling
    measured = float(rotated[..., :rotary].norm() / x[..., :rotary].norm())
    scaling = min(factors, key=lambda factor: abs(factor - measured))
    if abs(scaling - measured) > _TOLERANCE * measured:
        return None
    cos, sin = reference_rope_table(positions, inv_freq, scaling)
    for (interleaved, unzip), backwards in product(
        ((False, False), (True, False), (True, True)), (False, True)
    ):
        expected = reference_rope(x, cos, -sin if backwards else sin, interleaved, unzip)
        if _is_close(expected, rotated, x):
            return Rotation(frequencies, scaling, interleaved, unzip, backwards)
    if rotary == x.shape[-1] and inv_freq.numel() % _AXES == 0:
        expected = reference_rope(halves_first(x, _AXES), cos, sin)
        if _is_close(expected, halves_first(rotated, _AXES), x):
            return Rotation(frequencies, scaling, False, False, parts=_AXES)
    return None


def halves_first(x: Tensor, parts: int) -> Tensor:
    """Returns heads ``(..., size)`` with the first halves of all their parts before the second ones."""
    halves: Tensor = x.unflatten(-1, (parts, 2, -1))
    return halves.transpose(-3, -2).flatten(-3)


def _is_close(expected: Tensor, rotated: Tensor, x: Tensor) -> bool:
    return float((expected - rotated).abs().max()) < _TOLERANCE * float(x.abs().max())


def _has_token_dim(node: Node) -> bool:
    result = node.meta["val"]
    parts = result if isinstance(result, (tuple, list)) else [result]
    return all(any(isinstance(s, torch.SymInt) for s in part.shape) for part in parts)


def _is_plain(node: Node) -> bool:
    return node.target is operator.getitem or getattr(node.target, "namespace", "") == "aten"
