"""Rows that are equal because a tensor was expanded: computed once, and not copied onto each other.

Rotary embeddings of models that also see pictures number positions in three or four rows, and take every
third frequency from another row.  A text has the same number in all of them.
"""

from __future__ import annotations

import operator

from torch import fx
from torch.fx.node import Node

from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import CONVERSIONS, aten, call, is_op, match, value


class _Different(Exception):
    """A node does not treat all rows alike."""


class _EqualRows:
    """The nodes whose rows along their first dimension are equal, as the graph computes one row of them."""

    def __init__(self, graph: fx.Graph, expand: Node, row: Node) -> None:
        self._graph = graph
        self._rows = {expand: row}
        self._picked: dict[Node, Node] = {}
        """One of the rows → the row."""
        self._parts: dict[Node, tuple[object, ...]] = {}
        """A slice of a picked row → the row and the slice's arguments."""
        self._copies: list[Node] = []

    def follow(self) -> None:
        """Finds all nodes, and computes their row beside them.

        Raises:
            _Different: a node does not treat all rows alike.
        """
        for node in list(self._graph.nodes):
            inputs = node.all_input_nodes
            if any(n in self._rows for n in inputs):
                self._follow_rows(node)
            elif any(n in self._picked for n in inputs) and is_op(node, aten.slice.Tensor):
                part = OpCall(node)
                self._parts[node] = (self._picked[inputs[0]], part.dim, part.start, part.end, part.step)
            elif any(n in self._parts for n in inputs):
                target, source = (self._parts.get(n) for n in inputs[:2]) if len(inputs) > 1 else (None, 0)
                if not is_op(node, aten.copy_.default) or node.users or target != source:
                    raise _Different
                self._copies.append(node)

    def replace(self) -> None:
        """Makes the graph read the row, and removes the copies."""
        for copy in self._copies:
            self._graph.erase_node(copy)
        for picked, row in self._picked.items():
            picked.replace_all_uses_with(row)

    def _follow_rows(self, node: Node) -> None:
        source = node.all_input_nodes[0]
        if source not in self._rows:
            raise _Different
        row, found = self._rows[source], OpCall(node)
        if match(node, aten.split_with_sizes.default, dim=-1):
            with self._graph.inserting_before(node):
                self._rows[node] = call(self._graph, node.target, *found.arguments(self=row))
            return
        after = value(node)
        if match(node, aten.select.int, dim=0):
            self._picked[node] = row
            return
        if is_op(node, aten.slice.Tensor, aten.expand.default):
            if after.shape[1:] != value(source).shape[1:]:
                raise _Different
            self._rows[node] = row
            return
        with self._graph.inserting_before(node):
            if is_op(node, operator.getitem):
                new = call(self._graph, operator.getitem, row, found.index)
            elif is_op(node, aten.unsqueeze.default) and found.dim > 0:
                new = call(self._graph, node.target, row, found.dim - 1)
            elif is_op(node, *CONVERSIONS, aten.cos.default, aten.sin.default):
                new = call(self._graph, node.target, *found.arguments(self=row), **node.kwargs)
            elif is_op(node, aten.mul.Tensor) and self._is_smaller(found.other, row):
                new = call(self._graph, node.target, row, found.other)
            else:
                raise _Different
        if value(new).shape != after.shape[1:]:
            raise _Different
        self._rows[node] = new

    def _is_smaller(self, factor: object, row: Node) -> bool:
        """True if a factor does not reach the dimension of the rows."""
        return not isinstance(factor, Node) or (
            factor not in self._rows and value(factor).dim() <= value(row).dim()
        )


def _join_parts(graph: fx.Graph) -> None:
    """Replaces all parts of a split that are joined again by what was split."""
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        joined = OpCall(node)
        parts = [OpCall(part) for part in joined.tensors if is_op(part, operator.getitem)]
        split = match(parts[0].source, aten.split_with_sizes.default, dim=joined.dim) if parts else None
        if split is None:
            continue
        numbers = [part.index for part in parts if part.source is split.node]
        if numbers == list(range(len(split.split_sizes))) and len(numbers) == len(joined.tensors):
            node.replace_all_uses_with(split.self)


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Replaces rows that are equal to each other by one row."""
    graph = module.graph
    found = 0
    for node in list(graph.nodes):
        expanded = match(node, aten.expand.default)
        source = None if expanded is None else match(expanded.self, aten.unsqueeze.default, dim=0)
        if source is None or value(node).shape[1:] != value(source.node).shape[1:]:
            continue
        rows = _EqualRows(graph, node, source.self)
        try:
            rows.follow()
        except _Different:
            continue
        rows.replace()
        found += 1
    if found:
        _join_parts(graph)
    graph.eliminate_dead_code()
    return found
