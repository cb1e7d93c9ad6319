"""Probing: a region of a graph is recognized by its results, since decompositions differ between models."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.capture.probing import as_float32, compute, is_size, number
from torch_armllm.passes.lib.graph import constant, writes_to

MAX_NODES = 80


@dataclass
class Region:
    """Nodes that compute some results from one tensor and constants only.

    Attributes:
        entry: the tensor on which all results depend.
        nodes: the nodes after the entry, in the graph's order, in-place writes included.
        results: the nodes of the results.
    """

    entry: Node
    nodes: list[Node]
    results: tuple[Node, ...]

    def integers(self) -> set[int]:
        """Returns every integer among the arguments, such as view sizes and top-k counts."""
        integers: set[int] = set()

        def collect(argument: Any) -> Any:
            if type(argument) is int:
                integers.add(argument)
            return argument

        for node in self.nodes:
            fx.node.map_aggregate(node.args, collect)
            fx.node.map_aggregate(tuple(node.kwargs.values()), collect)
        return integers

    def small_numbers(self, most: float = 1e-2) -> list[float]:
        """Returns the positive floats up to ``most`` among the arguments, such as those added to a sum."""
        numbers: set[float] = set()

        def collect(argument: Any) -> Any:
            if type(argument) is float and 0 < argument <= most:
                numbers.add(argument)
            return argument

        for node in self.nodes:
            fx.node.map_aggregate(node.args, collect)
        return sorted(numbers)

    def constants(self, module: fx.GraphModule) -> list[Node]:
        """Returns the ``get_attr`` nodes that the region reads."""
        inputs = dict.fromkeys(n for node in self.nodes for n in node.all_input_nodes)
        return [n for n in inputs if constant(module, n) is not None]

    def values(
        self, module: fx.GraphModule, entry: Tensor, constants: dict[Node, Tensor] | None = None
    ) -> list[Tensor]:
        """Computes the results for an entry with any number of rows; floats are computed in float32.

        Args:
            module: the graph's module.
            entry: value of the entry.
            constants: values that replace those of constants.

        Raises:
            Exception: an operator fails.
        """
        known: dict[Node, Any] = {self.entry: entry.clone(), **(constants or {})}
        rows = entry.shape[0]

        def read(node: Node) -> Any:
            if node in known:
                return known[node]
            tensor = constant(module, node)
            if tensor is not None:
                return as_float32(tensor)
            return number(node.meta["val"], rows)

        for node in self.nodes:
            known[node] = compute(node, read)
        return [known[node] for node in self.results]

    def erase(self, graph: fx.Graph) -> None:
        """Removes the nodes without outside readers, including in-place writes to dead nodes."""
        inside = set(self.nodes) & set(graph.nodes)
        pending = [n for n in inside if any(user not in inside for user in n.users)]
        alive: set[Node] = set()
        while pending:
            node = pending.pop()
            alive.add(node)
            neighbors = {*node.all_input_nodes, *(user for user in node.users if writes_to(user, node))}
            pending += (neighbors & inside) - alive
        for node in reversed(self.nodes):
            if node in inside and node not in alive:
                graph.erase_node(node)


def regions(results: tuple[Node, ...], given: Set[Node] = frozenset()) -> Iterator[Region]:
    """Yields growing regions of a graph that compute ``results`` from one tensor, smallest first.

    Args:
        results: nodes of the graph.
        given: nodes whose values a region reads beside the tensor.
    """
    order = {node: i for i, node in enumerate(results[0].graph.nodes)}
    nodes: set[Node] = set()
    pending = set(results)
    while pending and len(nodes) < MAX_NODES:
        last = max(pending, key=order.__getitem__)
        if len(pending) == 1 and nodes and not _written(last):
            yield Region(last, sorted(nodes, key=order.__getitem__), results)
        pending.remove(last)
        if last.op != "call_function" or _has_weight(last):
            return
        nodes.add(last)
        inputs = {n for n in last.all_input_nodes if n.op != "get_attr" and not is_size(n)}
        writers = {user for user in last.users if writes_to(user, last)}
        pending |= (inputs | writers) - nodes - given


def _has_weight(node: Node) -> bool:
    """True if a node reads a constant matrix, as layers do and routers' selections do not."""
    shapes = (n.meta["val"].shape for n in node.all_input_nodes if n.op == "get_attr")
    return any(sum(size > 1 for size in shape) >= 2 for shape in shapes)


def _written(node: Node) -> bool:
    return any(writes_to(user, node) for user in node.users)
