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
from torch_armllm.passes.lib.linear_call import LinearCall
from torch_armllm.passes.lib.merged_weights import merge_panels, move_weight

PANEL = 16  # output rows of a packed panel


def _mergeable(module: fx.GraphModule, linear: LinearCall) -> bool:
    weight = constant(module, linear.weight)
    return linear.residual is None and weight is not None and linear.out_features % PANEL == 0


def _groups(module: fx.GraphModule) -> list[list[Node]]:
    """Returns the nodes of layers that have the same input.

    If they run several times, they have it each time, as a weight has one place in memory.
    """
    inputs: dict[Node, Any] = {}
    by_weight: dict[str, list[Any]] = defaultdict(list)
    for node in module.graph.nodes:
        if is_op(node, torch.ops.armllm.int4_linear.default):
            linear = LinearCall.of(node)
            if _mergeable(module, linear):
                inputs[node] = linear._replace(weight=None, out_features=None, bias=linear.bias is None)
                by_weight[str(linear.weight.target)].append(inputs[node])
    groups: dict[Any, list[Node]] = defaultdict(list)
    for node, given in inputs.items():
        groups[given, tuple(by_weight[str(LinearCall.of(node).weight.target)])].append(node)
    return [nodes for nodes in groups.values() if len(nodes) > 1]


def _merge(module: fx.GraphModule, context: PassContext, nodes: list[Node]) -> None:
    graph = module.graph
    node, layers = nodes[0], [LinearCall.of(n) for n in nodes]
    first = layers[0]
    tensors: list[Any] = [constant(module, layer.weight) for layer in layers]
    merged = merge_panels(tensors)
    panel = 0
    for layer in layers:
        end = panel + layer.out_features // PANEL
        move_weight(module, context, layer.weight, merged[panel:end])
        panel = end
    packed = new_constant(module, node, f"{first.weight.target}_merged", merged)
    bias = None
    if first.bias is not None:
        tensors = [constant(module, layer.bias) for layer in layers]
        bias = new_constant(module, node, f"{first.weight.target}_merged_bias", torch.cat(tensors))
    size = sum(layer.out_features for layer in layers)
    whole = first._replace(weight=packed, out_features=size, bias=bias)
    with graph.inserting_before(node):
        out = call(graph, torch.ops.armllm.int4_linear.default, *whole)
        begin = 0
        parts = []
        for layer in layers:
            parts.append(call(graph, aten.slice.Tensor, out, -1, begin, begin + layer.out_features))
            begin += layer.out_features
    for old, part in zip(nodes, parts, strict=True):
        assert value(old).shape == value(part).shape
        old.replace_all_uses_with(part)
        graph.erase_node(old)
    drop_unused(module, *(str(layer.weight.target) for layer in layers))


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Merges quantized layers with the same input; their results become column slices."""
    groups = _groups(module)
    for nodes in groups:
        _merge(module, context, nodes)
    module.graph.eliminate_dead_code()
    return len(groups)
