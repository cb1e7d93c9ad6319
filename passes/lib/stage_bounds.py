"""Places at which a captured graph can be cut into stages, and those that share its weights most evenly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.capture.markers.recurrent_ops import markers_of
from torch_armllm.passes.lib.graph import aten, constant, is_op, value

armllm = torch.ops.armllm


@dataclass(frozen=True)
class Bound:
    """A place between two nodes.

    Attributes:
        place: number of nodes before it.
        rows: results before it that nodes after it read: rows of floats ``(1, T, …)``, all of one dtype.
        columns: elements of these for each token.
    """

    place: int
    rows: tuple[Node, ...]
    columns: int


def stage_bounds(module: fx.GraphModule, stages: int, head_bytes: int) -> list[Bound]:
    """Returns the places between stages, such that the largest stage has as few bytes as possible.

    A place is where the fewest columns pass, as between two layers.  What follows from positions and token
    ids alone, without a table of floats, does not pass: each stage computes it.

    Args:
        module: a captured graph, before any pass.
        stages: number of stages, at least 2.
        head_bytes: of the first stage, beside those of its nodes.

    Raises:
        ValueError: the graph has fewer places.
    """
    nodes = list(module.graph.nodes)
    keeps = _cache_marks(module, nodes)
    found = [b for b in _bounds(nodes) if 0 < keeps[b.place] < keeps[-1]]
    narrow = [b for b in found if b.columns == min(each.columns for each in found)]
    end = len(nodes)
    sizes = _bytes_between(module, nodes, [0, *(bound.place for bound in narrow), end])
    best: dict[int, tuple[float, list[Bound]]] = {
        at: (head_bytes + sizes[0, bound.place], [bound]) for at, bound in enumerate(narrow)
    }
    for _ in range(stages - 2):
        best = _with_another(best, narrow, keeps, sizes)
    whole = [(max(cost, sizes[chosen[-1].place, end]), chosen) for cost, chosen in best.values()]
    if not whole:
        raise ValueError(f"its layers cannot be shared out among {stages} stages")
    return min(whole, key=lambda each: each[0])[1]


def _with_another(
    best: dict[int, tuple[float, list[Bound]]],
    bounds: Sequence[Bound],
    keeps: Sequence[int],
    sizes: Mapping[tuple[int, int], int],
) -> dict[int, tuple[float, list[Bound]]]:
    """Returns, for each bound, the best choice that has one bound more and ends with it."""
    longer: dict[int, tuple[float, list[Bound]]] = {}
    for at, bound in enumerate(bounds):
        choices = [
            (max(cost, sizes[chosen[-1].place, bound.place]), [*chosen, bound])
            for before, (cost, chosen) in best.items()
            if before < at and keeps[chosen[-1].place] < keeps[bound.place]
        ]
        if choices:
            longer[at] = min(choices, key=lambda each: each[0])
    return longer


def _cache_marks(module: fx.GraphModule, nodes: Sequence[Node]) -> list[int]:
    """Returns how many nodes before each place keep something in the cache; a stage needs one."""
    keeping = set(markers_of(module))
    marks = (n in keeping or is_op(n, armllm.attention, armllm.entry_attention) for n in nodes)
    return [0, *accumulate(map(int, marks))]


def _bytes_between(
    module: fx.GraphModule, nodes: Sequence[Node], places: Sequence[int]
) -> dict[tuple[int, int], int]:
    """Returns the bytes of weights that the nodes between two places read, without tables of embeddings.

    Layers that run several times read a weight in several stages, each of which then has it.
    """
    sizes: dict[tuple[int, int], int] = {}
    weights = [_weights_of(module, node) for node in nodes]
    for number, begin in enumerate(places):
        read: dict[str, int] = {}
        for before, after in pairwise(places[number:]):
            for each in weights[before:after]:
                read |= each
            sizes[begin, after] = sum(read.values())
    return sizes


def _weights_of(module: fx.GraphModule, node: Node) -> dict[str, int]:
    """Returns the bytes of each weight that a node reads; none of an embedding."""
    if is_op(node, aten.embedding, armllm.split_embedding):
        return {}
    read = {str(each.target): constant(module, each) for each in node.all_input_nodes}
    return {name: weight.nbytes for name, weight in read.items() if weight is not None}


def _bounds(nodes: Sequence[Node]) -> list[Bound]:
    """Returns the places where nothing passes but rows of floats."""
    last_use = {each: at for at, node in enumerate(nodes) for each in node.all_input_nodes}
    depends = _dependent(nodes)
    passing: dict[Node, None] = {}
    found = []
    for at, node in enumerate(nodes):
        for each in node.all_input_nodes:
            if last_use[each] == at:
                passing.pop(each, None)
        if node in depends and last_use.get(node, -1) > at:
            passing[node] = None
        rows = tuple(passing)
        if rows and all(map(_are_rows, rows)) and len({value(n).dtype for n in rows}) == 1:
            found.append(Bound(at + 1, rows, sum(value(n)[0, 0].numel() for n in rows)))
    return found


def _dependent(nodes: Sequence[Node]) -> set[Node]:
    """Returns the nodes whose results depend on the embeddings of tokens."""
    dependent: set[Node] = set()
    from_ids: set[Node] = set()
    for node in nodes:
        inputs = node.all_input_nodes
        if node.name == "input_ids" or any(n in from_ids for n in inputs):
            from_ids.add(node)
            if any(n in dependent for n in inputs) or _is_float(node):
                dependent.add(node)
    return dependent


def _is_float(node: Node) -> bool:
    result = node.meta.get("val")
    return isinstance(result, Tensor) and result.is_floating_point()


def _are_rows(node: Node) -> bool:
    """True for rows of floats of each token."""
    if not _is_float(node):
        return False
    sizes = value(node).shape
    return (
        len(sizes) > 2
        and sizes[0] == 1
        and not isinstance(sizes[1], int)
        and all(isinstance(size, int) for size in sizes[2:])
    )
