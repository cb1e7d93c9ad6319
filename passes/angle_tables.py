"""Cosines and sines of the tokens' angles, which no rotation of an attention reads, become ``rope_table``."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import (
    CONVERSIONS,
    aten,
    call,
    constant,
    is_op,
    match,
    new_constant,
    replace_nodes,
    strip,
    value,
)

_SHAPES = (*CONVERSIONS, aten.unsqueeze, aten.expand, aten.view)


def _positions(node: Any) -> tuple[Node, int] | None:
    """Returns the graph's positions and what is added to them, at most 0; None for anything else."""
    offset = 0
    node = strip(node, *_SHAPES)
    shifted = match(node, aten.sub.Tensor, alpha=1)
    if shifted is not None and isinstance(shifted.other, int):
        node, offset = strip(shifted.self, *_SHAPES), -shifted.other
    known = isinstance(node, Node) and node.op == "placeholder" and node.name == "position_ids"
    return (node, offset) if known and offset <= 0 else None


def _once(angles: Any) -> tuple[Any, bool]:
    """Returns a of ``cat([a, a])`` and True; any other node and False."""
    joined = match(angles, aten.cat.default)
    parts = [] if joined is None else joined.tensors
    last = joined is not None and joined.dim % value(angles).dim() == value(angles).dim() - 1
    return (parts[0], True) if last and len(parts) == 2 and parts[0] is parts[1] else (angles, False)


class _Tables:
    """Tables of a graph, each inserted once."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.known: list[tuple[int, Tensor, Node]] = []

    def get(self, angles: Any) -> Node | None:
        """Returns the table ``(cos, sin)`` of angles; None if they are not of the tokens' positions."""
        product = match(angles, aten.mul.Tensor)
        if product is None:
            return None
        positions = _positions(product.self)
        frequencies = constant(self.module, strip(product.other, *_SHAPES))
        if positions is None or frequencies is None or frequencies.dim() != 1:
            return None
        node, offset = positions
        frequencies = frequencies.float().contiguous()
        if value(angles).shape[1:] != (value(node).shape[1], len(frequencies)):
            return None
        for known_offset, known, table in self.known:
            if known_offset == offset and torch.equal(known, frequencies):
                return table
        graph = self.module.graph
        held = new_constant(self.module, angles, "angle_frequencies", frequencies)
        with graph.inserting_before(angles):
            table = call(graph, torch.ops.armllm.rope_table.default, node, held, 1.0, offset)
        self.known.append((offset, frequencies, table))
        return table


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Rewrites cosines and sines of products of positions and constant frequencies."""
    graph, tables = module.graph, _Tables(module)

    def rows(node: Node) -> Node | None:
        if not is_op(node, aten.cos.default, aten.sin.default) or value(node).dtype != torch.float32:
            return None
        angles, joined = _once(OpCall(node).self)
        if (table := tables.get(angles)) is None:
            return None
        found = call(graph, operator.getitem, table, 0 if is_op(node, aten.cos.default) else 1)
        once = call(graph, aten.unsqueeze.default, found, 0)
        return call(graph, aten.cat.default, [once, once], -1) if joined else once

    return replace_nodes(graph, rows)
