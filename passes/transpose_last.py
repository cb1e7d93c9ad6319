"""Norms, splits and factors of heads before their transpose.

``norm(x.transpose(1, 2))`` becomes ``norm(x).transpose(1, 2)``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import aten, call, is_op, match, value

_NORMS = (torch.ops.armllm.rms_norm.default, torch.ops.armllm.layer_norm.default)
_SPLITS = (aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default)


def _splits_last_dim(node: Any) -> bool:
    return is_op(node, *_SPLITS) and OpCall(node).dim in (-1, 3)


def _split_first(graph: fx.Graph, node: Node, heads: Node) -> None:
    """Splits heads before their transpose; each part is transposed."""
    with graph.inserting_before(node):
        parts = _of_heads(graph, node, heads)
        for user in list(node.users):
            part = call(graph, operator.getitem, parts, OpCall(user).index)
            user.replace_all_uses_with(call(graph, aten.transpose.int, part, 1, 2))
            graph.erase_node(user)


def _of_heads(graph: fx.Graph, node: Node, heads: Node) -> Node:
    """Inserts the call of a node for other heads."""
    _, *others = node.args
    return call(graph, node.target, heads, *others, **node.kwargs)


def _is_scaled(node: Any) -> bool:
    """True for a tensor multiplied by a number."""
    return is_op(node, aten.mul.Tensor) and isinstance(OpCall(node).other, float | int)


def _compute_first(graph: fx.Graph, node: Node, heads: Node) -> None:
    with graph.inserting_before(node):
        result = _of_heads(graph, node, heads)
        node.replace_all_uses_with(call(graph, aten.transpose.int, result, 1, 2))


def _move_of(node: Node) -> Callable[[fx.Graph, Node, Node], None] | None:
    """Returns the function that moves a node before a transpose; None if it stays."""
    if is_op(node, *_NORMS) or _is_scaled(node):
        return _compute_first
    return _split_first if _splits_last_dim(node) else None


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Moves transposes after the norms, the splits and the factors of heads that read them."""
    graph = module.graph
    num_rewritten = 0
    for node in list(graph.nodes):
        move = _move_of(node)
        transposed = None if move is None else match(OpCall(node).first, aten.transpose.int, dim0=1, dim1=2)
        if move is None or transposed is None or value(transposed.node).dim() != 4:
            continue
        move(graph, node, transposed.self)
        graph.erase_node(node)
        num_rewritten += 1
    graph.eliminate_dead_code()
    return num_rewritten
