"""Quantized linear layers with the same input, such as query, key and value projections, become one."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import (
    aten,
    call,
    constant,
    drop_unused,
    is_op,
    new_constant,
    value,
)

PANEL = 16  # output rows of a packed panel


def _bias(node: Node) -> Any:
    return node.args[4] if len(node.args) > 4 else None


def _digits(node: Node) -> Any:
    return node.args[6] if len(node.args) > 6 else 1


def _mergeable(module: fx.GraphModule, node: Node) -> bool:
    residual = node.args[5] if len(node.args) > 5 else None
    weight = constant(module, node.args[1])
    size: Any = node.args[2]
    return residual is None and weight is not None and size % PANEL == 0


def _groups(module: fx.GraphModule) -> list[list[Node]]:
    by_input: dict[Any, list[Node]] = defaultdict(list)
    for node in module.graph.nodes:
        if is_op(node, torch.ops.armllm.int4_linear.default) and _mergeable(module, node):
            by_input[node.args[0], node.args[3], _digits(node), _bias(node) is None].append(node)
    return [nodes for nodes in by_input.values() if len(nodes) > 1]


def _merge(module: fx.GraphModule, context: PassContext, nodes: list[Node]) -> None:
    graph = module.graph
    first = nodes[0]
    weights: list[Any] = [n.args[1] for n in nodes]
    sizes: list[Any] = [n.args[2] for n in nodes]
    tensors: list[Any] = [constant(module, w) for w in weights]
    merged = torch.cat(tensors)
    panel = 0
    for weight, size in zip(weights, sizes, strict=True):
        context.on_new_weight(str(weight.target), merged[panel : panel + size // PANEL])
        panel += size // PANEL
    packed = new_constant(module, first, f"{weights[0].target}_merged", merged)
    bias = None
    if _bias(first) is not None:
        tensors = [constant(module, _bias(n)) for n in nodes]
        bias = new_constant(module, first, f"{weights[0].target}_merged_bias", torch.cat(tensors))
    with graph.inserting_before(first):
        out = call(
            graph,
            torch.ops.armllm.int4_linear.default,
            first.args[0],
            packed,
            sum(sizes),
            first.args[3],
            bias,
            None,
            _digits(first),
        )
        begin = 0
        parts = []
        for size in sizes:
            parts.append(call(graph, aten.slice.Tensor, out, -1, begin, begin + size))
            begin += size
    for node, part in zip(nodes, parts, strict=True):
        assert value(node).shape == value(part).shape
        node.replace_all_uses_with(part)
        graph.erase_node(node)
    drop_unused(module, *(str(weight.target) for weight in weights))


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Merges quantized layers with the same input; their results become column slices.

    Returns:
        The number of groups merged.
    """
    groups = _groups(module)
    for nodes in groups:
        _merge(module, context, nodes)
    module.graph.eliminate_dead_code()
    return len(groups)
