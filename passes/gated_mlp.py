"""Gated MLPs: ``act(x·Wg) · (x·Wu)`` becomes one quantized layer, or ``gated_act`` of float layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import (
    aten,
    call,
    call_op,
    constant,
    drop_unused,
    is_op,
    new_constant,
    value,
)
from torch_armllm.passes.lib.linear_call import LinearCall
from torch_armllm.passes.lib.merged_weights import merge_pairs, move_weight


def _activation(node: Any) -> str | None:
    if is_op(node, aten.silu.default):
        return "silu"
    if is_op(node, aten.gelu.default):
        return "gelu_tanh" if node.kwargs.get("approximate", "none") == "tanh" else "gelu"
    if is_op(node, aten.relu.default):
        return "relu"
    return None


def _gate_and_up(node: Node) -> tuple[str, Any, Node] | None:
    a, b = OpCall(node).self, OpCall(node).other
    for gate, up in ((a, b), (b, a)):
        name = _activation(gate)
        if name is not None and isinstance(up, Node) and len(gate.users) == 1:
            return name, OpCall(gate).self, up
    return None


def _merge(module: fx.GraphModule, context: PassContext, node: Node, name: str, gate: Node, up: Node) -> bool:
    op = torch.ops.armllm.int4_linear.default
    if not (is_op(gate, op) and is_op(up, op) and len(gate.users) == 1 and len(up.users) == 1):
        return False
    gate_layer, up_layer = LinearCall.of(gate), LinearCall.of(up)
    packed_gate, packed_up = constant(module, gate_layer.weight), constant(module, up_layer.weight)
    if packed_gate is None or packed_up is None or not _mergeable(gate_layer, up_layer):
        return False
    merged = merge_pairs(packed_gate, packed_up)
    pairs = merged.view(-1, 2, merged.shape[-1])
    gate_name, up_name = str(gate_layer.weight.target), str(up_layer.weight.target)
    move_weight(module, context, gate_layer.weight, pairs[:, 0])
    move_weight(module, context, up_layer.weight, pairs[:, 1])
    weight = new_constant(module, node, f"{gate_name}_and_up", merged)
    with module.graph.inserting_before(node):
        fused = call_op(
            module.graph,
            torch.ops.armllm.int4_gated_linear.default,
            x=gate_layer.x,
            weight=weight,
            out_features=gate_layer.out_features,
            scheme=gate_layer.scheme,
            activation=name,
            gate_bias=gate_layer.bias,
            up_bias=up_layer.bias,
            digits=gate_layer.digits,
            rotated=gate_layer.rotated,
        )
    node.replace_all_uses_with(fused)
    drop_unused(module, gate_name, up_name)
    return True


def _mergeable(gate: LinearCall, up: LinearCall) -> bool:
    """True if two layers differ in nothing but their weights and biases."""
    alike = gate._replace(weight=None, bias=None) == up._replace(weight=None, bias=None)
    return alike and gate.residual is None and (gate.bias is None) == (up.bias is None)


def _alike(gate: Tensor, up: Tensor) -> bool:
    """True if two tensors have the same shape and dtype; gated norms multiply other dtypes."""
    return gate.shape == up.shape and gate.dtype == up.dtype


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Rewrites all products ``act(gate) · up``."""
    graph = module.graph
    num_rewritten = 0
    for node in list(graph.nodes):
        if not is_op(node, aten.mul.Tensor):
            continue
        match = _gate_and_up(node)
        if match is None or not _alike(value(match[1]), value(match[2])):
            continue
        name, gate, up = match
        if not _merge(module, context, node, name, gate, up):
            with graph.inserting_before(node):
                node.replace_all_uses_with(call(graph, torch.ops.armllm.gated_act.default, gate, up, name))
        num_rewritten += 1
    graph.eliminate_dead_code()
    return num_rewritten
