"""Marker op of an indexer: the selection of the tokens that a layer attends to.

Models compute scores of all tokens, add a mask and take the indices of the highest.  After export these nodes
become the marker, which keeps the indexer's queries, keys and weights as its operands.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.capture.markers.declare import marker
from torch_armllm.ops.op_call import OpCall
from torch_armllm.ops.select.reference import highest, index_scores

aten = torch.ops.aten


class UnknownSelection(RuntimeError):
    """An indexer computes something else than the marker."""


@marker(
    "selection(Tensor q, Tensor k, Tensor weights, float scale, int top_k) -> Tensor",
    lambda a: a.q.new_empty((1, a.q.shape[1], a.k.shape[1]), dtype=torch.bool),
)
def selection(q: Tensor, k: Tensor, weights: Tensor, scale: float, top_k: int) -> Tensor:
    """Selects the earlier tokens of the highest scores; the reference implementation.

    Args:
        q: queries ``(1, T, heads, head_size)``.
        k: keys ``(1, T, head_size)``, which all heads share.
        weights: weights of the heads ``(1, T, heads)``.
        scale: factor of the products.
        top_k: most tokens that a token selects.

    Returns:
        bool ``(1, T, T)``: for each token, the tokens that it selects.
    """
    scores = index_scores(q[0], weights[0], k[0], scale)
    count = scores.shape[0]
    seen = torch.ones(count, count, dtype=torch.bool).tril()
    chosen = highest(scores.masked_fill(~seen, float("-inf")), min(top_k, count))
    return (torch.zeros_like(seen).scatter(-1, chosen, True) & seen)[None]


def mark_selections(graph: fx.Graph, top_k: int) -> None:
    """Replaces the indices that attentions are given by markers.

    Args:
        graph: exported with indexers that select one token.
        top_k: tokens that they select.

    Raises:
        UnknownSelection: indices are computed in another way.
    """
    markers: dict[Node, Node] = {}
    for node in list(graph.nodes):
        if (indices := selected_by(node)) is None:
            continue
        if indices not in markers:
            markers[indices] = _marker(graph, indices, top_k)
        OpCall(node).replace(selected=markers[indices])
    graph.eliminate_dead_code()


def selected_by(node: Node) -> Any:
    """Returns what an attention is given to select tokens; None for other nodes and attention to all."""
    return OpCall(node).selected if is_call(node, torch.ops.armllm.attention.default) else None


def check_selections(graph: fx.Graph) -> None:
    """Checks that every selection of single tokens is of latents, which attention reads one by one.

    Raises:
        UnknownSelection: keys or values of a head are selected.
    """
    for node in graph.nodes:
        if is_call(selected_by(node), torch.ops.armllm.selection.default):
            sides = (OpCall(node).k, OpCall(node).v)
            if not all(
                is_call(side, operator.getitem)
                and is_call(OpCall(side).source, torch.ops.armllm.expand_kv.default)
                for side in sides
            ):
                raise UnknownSelection("keys and values are selected, and only latents can be")


def _marker(graph: fx.Graph, indices: Node, top_k: int) -> Node:
    q, k, weights, scale = _operands(indices)
    values = q.meta["val"], k.meta["val"], weights.meta["val"]
    with graph.inserting_before(indices):
        node = graph.call_function(torch.ops.armllm.selection.default, (q, k, weights, scale, top_k))
    node.meta = dict(indices.meta)
    with values[0].fake_mode:
        node.meta["val"] = torch.ops.armllm.selection(*values, scale, top_k)
    return node


def _operands(indices: Node) -> tuple[Node, Node, Node, float]:
    """Returns queries, keys, weights and the scale of the scores whose highest are taken."""
    top = take(uncast(indices), operator.getitem, 1)
    scores = take(top, aten.topk.default, 1)
    if is_call(scores, aten.add.Tensor) and _is_zero(OpCall(scores).other) and len(scores.kwargs) == 0:
        scores = OpCall(scores).self
    row_weights, products = _pair(take(scores, aten.squeeze.dim, -2), aten.matmul.default)
    weights = take(row_weights, aten.unsqueeze.default, -2)
    products = take(products, aten.relu.default)
    scale = 1.0
    if is_call(products, aten.mul.Tensor) and isinstance(OpCall(products).other, float):
        products, scale = OpCall(products).self, OpCall(products).other
    if scale <= 0:
        raise UnknownSelection(f"the scores of an indexer are scaled by {scale}")
    q, keys = _pair(products, aten.matmul.default)
    keys = take(uncast(take(keys, aten.unsqueeze.default, 1)), aten.transpose.int, -1, -2)
    q, weights = uncast(q), uncast(weights)
    dims = [x.meta["val"].dim() for x in (q, keys, weights)]
    if dims != [4, 3, 3]:
        raise UnknownSelection("operands of an indexer have other dimensions")
    return q, keys, weights, scale


def is_call(node: Any, *targets: Any) -> bool:
    """True if a node calls one of the targets."""
    return isinstance(node, Node) and node.target in targets


def take(node: Any, target: Any, *rest: Any) -> Node:
    """Returns the first argument of a call, whose other arguments must be ``rest``.

    Raises:
        UnknownSelection: the node is another call.
    """
    source, *others = node.args if is_call(node, target) else (None,)
    if not isinstance(source, Node) or tuple(others) != rest:
        raise UnknownSelection(f"{node} is not {target} of {rest}")
    return source


def _pair(node: Any, target: Any) -> tuple[Node, Node]:
    if not is_call(node, target) or not all(isinstance(x, Node) for x in node.args):
        raise UnknownSelection(f"{node} is not {target}")
    first, second = node.args
    return first, second


def uncast(node: Node) -> Node:
    """Returns what a node converts to another dtype."""
    while is_call(node, aten.to.dtype, aten._to_copy.default):
        node = OpCall(node).self
    return node


def _is_zero(node: Any) -> bool:
    """True if a node shows a tensor of zeros."""
    while is_call(node, aten.slice.Tensor, aten.select.int, aten.to.dtype, aten.to.dtype_layout):
        node = OpCall(node).self
    return is_call(node, aten.zeros.default)
