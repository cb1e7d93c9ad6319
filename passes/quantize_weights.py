"""Quantization of float weights in a graph: linear → ``int4_linear``, experts → ``int4_moe``.

A model that `patch` quantized has packed weights before it is captured, so that this pass finds none.  The
pass is for graphs whose float weights are constants: those of
``torch.compile(…, backend="armllm", options={"quantization": "int4"})``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.capture.markers.experts import expert_layout
from torch_armllm.ops.linear import GROUP, interleave_panels
from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import (
    CONVERSIONS,
    aten,
    call,
    call_op,
    constant,
    drop_unused,
    is_op,
    new_constant,
)
from torch_armllm.quant.packing import quantize_matrices
from torch_armllm.quant.schemes.registry import scheme_named

_VIEWS = (aten.view, aten.reshape, aten.slice, aten.select, aten.unsqueeze, aten.squeeze, *CONVERSIONS)
_ROUTING_OPS = (aten.softmax, aten.sigmoid, aten.topk, torch.ops.armllm.moe_route)


def _readers(node: Node) -> set[Node]:
    """Returns the users of a node's result, looking through views."""
    readers: set[Node] = set()
    for user in node.users:
        readers |= _readers(user) if is_op(user, *_VIEWS) else {user}
    return readers


def _is_router(node: Node) -> bool:
    return any(is_op(reader, *_ROUTING_OPS) for reader in _readers(node))


def _is_head(node: Node) -> bool:
    readers = _readers(node)
    return bool(readers) and all(reader.op == "output" for reader in readers)


def _float_matrix(module: fx.GraphModule, node: Any, dims: int) -> Tensor | None:
    weight = constant(module, node)
    if weight is None or weight.dim() != dims or not weight.dtype.is_floating_point:
        return None
    return weight


def _quantize_linear(module: fx.GraphModule, node: Node, scheme: str) -> bool:
    x, weight_node, *biases = node.args
    weight = _float_matrix(module, weight_node, 2)
    if weight is None or _is_router(node):
        return False
    assert isinstance(weight_node, Node)
    head = _is_head(node)
    rotated = head and weight.shape[1] % GROUP == 0
    packed, _ = quantize_matrices([weight], scheme_named("int8" if head else scheme), rotated=rotated)
    new = new_constant(module, node, f"{weight_node.target}_packed", packed[0])
    bias = biases[0] if biases else None
    rows = weight.shape[0]
    with module.graph.inserting_before(node):
        if head:
            op, more = torch.ops.armllm.int8_linear.default, (None, 1, rotated)
            linear = call(module.graph, op, x, new, rows, bias, *more)
        else:
            linear = call(module.graph, torch.ops.armllm.int4_linear.default, x, new, rows, scheme, bias)
    node.replace_all_uses_with(linear)
    drop_unused(module, str(weight_node.target))
    return True


def _quantize_experts(module: fx.GraphModule, node: Node, scheme: str) -> bool:
    experts = OpCall(node)
    gate_up, down = _float_matrix(module, experts.gate_up, 3), _float_matrix(module, experts.down, 3)
    if gate_up is None or down is None:
        return False
    bias_node, layout = experts.gate_up_bias, expert_layout(experts)
    bias = constant(module, bias_node)
    handler = scheme_named(scheme)
    parts = [quantize_matrices(part, handler)[0] for part in layout.inner(gate_up)]
    downs = layout.outer(down)
    packed = interleave_panels(*parts) if layout.gated else parts[0]
    first = new_constant(module, node, f"{experts.gate_up.target}_packed", packed)
    second = new_constant(module, node, f"{experts.down.target}_packed", quantize_matrices(downs, handler)[0])
    if bias is not None:
        assert isinstance(bias_node, Node)
        bias_node = new_constant(module, node, f"{bias_node.target}_halves", layout.inner_bias(bias))
    with module.graph.inserting_before(node):
        moe = call_op(
            module.graph,
            torch.ops.armllm.int4_moe.default,
            x=experts.x,
            expert_ids=experts.expert_ids,
            expert_weights=experts.expert_weights,
            gate_up=first,
            down=second,
            intermediate=downs[0].shape[1],
            scheme=scheme,
            activation=layout.activation,
            limit=layout.limit,
            gate_up_bias=bias_node,
            down_bias=experts.down_bias,
            gated=layout.gated,
            identity_experts=layout.identity_experts,
            up_limit=layout.up_limit,
        )
    node.replace_all_uses_with(moe)
    drop_unused(module, str(experts.gate_up.target), str(experts.down.target))
    return True


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Quantizes constant float weights to ``context.scheme``.

    The output head becomes INT8; routers stay in floats.

    Returns:
        The number of layers quantized; 0 if the context has no scheme.
    """
    if context.scheme is None:
        return 0
    num_rewritten = 0
    for node in list(module.graph.nodes):
        if is_op(node, aten.linear.default):
            num_rewritten += _quantize_linear(module, node, context.scheme)
        elif is_op(node, torch.ops.armllm.experts.default):
            num_rewritten += _quantize_experts(module, node, context.scheme)
    module.graph.eliminate_dead_code()
    return num_rewritten
