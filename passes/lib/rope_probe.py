"""Rotations of queries and keys, found by computing them: spellings differ too much from model to model."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.ops.rope import reference_rope, reference_rope_table
from torch_armllm.passes.lib.graph import aten, constant, is_op, value
from torch_armllm.passes.lib.probe import in_float32, is_size, number

MOST_NODES = 60
_POSITIONS = (0, 1, 2, 3, 7, 33, 130, 511)
_TOLERANCE = 2e-2
"""Relative; models in bfloat16 round their cosines to 8 bits."""


@dataclass(frozen=True)
class Rotation:
    """How a part of a graph turns heads by their tokens' positions.

    Attributes:
        inv_freq: the constant with each pair's frequency.
        scaling: factor of the turned dimensions.
        interleaved, unzip: as in `torch_armllm.ops.rope.rope_`.
    """

    inv_freq: Node
    scaling: float
    interleaved: bool
    unzip: bool


class Rotations:
    """Finds rotations in one graph; layers that look the same are computed once."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self._order = {node: i for i, node in enumerate(module.graph.nodes)}
        self._positional = self._depends_on_positions()
        self._sampled: dict[Node, Any] = {}
        self._known: dict[Any, Rotation | None] = {}

    def find(self, heads: Node) -> tuple[Node, Rotation] | None:
        """What is turned to become ``heads`` of ``(1, n, T, size)``, as ``(1, T, n, size)``, and how."""
        region = self._region(heads)
        if region is None:
            return None
        entry, nodes = region
        key = self._signature(entry, nodes)
        if key not in self._known:
            self._known[key] = self._probe(heads, entry, nodes)
        rotation = self._known[key]
        return None if rotation is None else (entry, rotation)

    def _depends_on_positions(self) -> set[Node]:
        """What is computed from positions and constants alone."""
        found: set[Node] = set()
        for node in self.module.graph.nodes:
            if node.op == "placeholder" and node.name == "position_ids":
                found.add(node)
            elif node.op == "call_function" and isinstance(node.meta.get("val"), (Tensor, tuple, list)):
                inputs = [n for n in node.all_input_nodes if n.op != "get_attr" and not is_size(n)]
                # What has no row a token depends on the longest of them: frequencies that change with length.
                if inputs and _by_token(node) and all(n in found for n in inputs):
                    found.add(node)
        return found

    def _region(self, heads: Node) -> tuple[Node, list[Node]] | None:
        """The nodes between ``heads`` and the one tensor, laid out by token, that they make it of."""
        count, length, size = value(heads).shape[1:]
        wanted = (1, length, count, size)
        nodes: set[Node] = set()
        pending = {heads}
        turned = False
        while pending and len(nodes) < MOST_NODES:
            last = max(pending, key=self._order.__getitem__)
            made = last.meta.get("val")
            if turned and len(pending) == 1 and isinstance(made, Tensor) and tuple(made.shape) == wanted:
                if all(user in nodes for user in last.users):
                    return last, sorted(nodes, key=self._order.__getitem__)
                return None
            pending.remove(last)
            if last.op != "call_function" or not _is_plain(last):
                return None
            nodes.add(last)
            for source in last.all_input_nodes:
                if source in self._positional:
                    turned = True
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
        """What a node that depends on positions alone gives for some."""
        if node not in self._sampled:
            if node.op == "placeholder":
                self._sampled[node] = torch.tensor(_POSITIONS)[None]
            else:
                self._sampled[node] = self._run(node, {})
        return self._sampled[node]

    def _run(self, node: Node, known: dict[Node, Any]) -> Any:
        def read(source: Node) -> Any:
            if source in known:
                return known[source]
            if source in self._positional:
                return self._sample(source)
            tensor = constant(self.module, source)
            if tensor is not None:
                return tensor.float() if tensor.is_floating_point() else tensor
            return number(source.meta["val"], len(_POSITIONS))

        args = fx.node.map_aggregate(fx.map_arg(node.args, read), in_float32)
        kwargs = fx.node.map_aggregate(fx.map_arg(node.kwargs, read), in_float32)
        return node.target(*args, **kwargs)  # type: ignore[operator,misc]

    def _probe(self, heads: Node, entry: Node, nodes: list[Node]) -> Rotation | None:
        count, _, size = value(heads).shape[1:]
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(1, len(_POSITIONS), int(count), int(size), generator=generator)
        known: dict[Node, Any] = {entry: x.clone()}
        try:
            for node in nodes:
                known[node] = self._run(node, known)
        except Exception:  # noqa: BLE001 - what cannot be run on a few tokens is no rotation
            return None
        turned = known[heads].transpose(1, 2)
        angles = self._angles(nodes)
        factors = {a for n in angles if is_op(n, aten.mul.Tensor) for a in n.args if isinstance(a, float)}
        for candidate in self._frequencies(angles, int(size) // 2):
            found = _explain(self.module, x, turned, candidate, factors | {1.0})
            if found is not None:
                return found
        return None

    def _angles(self, nodes: list[Node]) -> list[Node]:
        """The positional side of a region."""
        seen: dict[Node, None] = {}
        pending = [s for n in nodes for s in n.all_input_nodes if s in self._positional]
        while pending:
            node = pending.pop()
            if node not in seen:
                seen[node] = None
                pending += [s for s in node.all_input_nodes if constant(self.module, s) is None]
        return list(seen)

    def _frequencies(self, angles: list[Node], most: int) -> Iterable[Node]:
        """Constants that the positional side multiplies by, which may be frequencies."""
        for node in dict.fromkeys(s for n in angles for s in n.all_input_nodes):
            tensor = constant(self.module, node)
            if tensor is not None and tensor.is_floating_point() and 0 < tensor.numel() <= most:
                yield node


def _explain(
    module: fx.GraphModule, x: Tensor, turned: Tensor, frequencies: Node, factors: set[float]
) -> Rotation | None:
    """The rotation by these frequencies that makes ``turned`` of ``x``, if one does."""
    tensor = constant(module, frequencies)
    assert tensor is not None
    inv_freq = tensor.float().flatten()
    rotary = 2 * inv_freq.numel()
    positions = torch.tensor(_POSITIONS)
    # a rotation keeps lengths, so they show the scaling
    measured = float(turned[..., :rotary].norm() / x[..., :rotary].norm())
    scaling = min(factors, key=lambda factor: abs(factor - measured))
    if abs(scaling - measured) > _TOLERANCE * measured:
        return None
    cos, sin = reference_rope_table(positions, inv_freq, scaling)
    for interleaved, unzip in ((False, False), (True, False), (True, True)):
        expected = reference_rope(x, cos, sin, interleaved, unzip)
        if float((expected - turned).abs().max()) < _TOLERANCE * float(x.abs().max()):
            return Rotation(frequencies, scaling, interleaved, unzip)
    return None


def _by_token(node: Node) -> bool:
    made = node.meta["val"]
    parts = made if isinstance(made, (tuple, list)) else [made]
    return all(any(isinstance(s, torch.SymInt) for s in part.shape) for part in parts)


def _is_plain(node: Node) -> bool:
    return node.target is operator.getitem or getattr(node.target, "namespace", "") == "aten"
