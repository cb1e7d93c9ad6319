"""Queries, keys and values of recognized attention in the layout of the marker op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Node

from torch_armllm.capture.probing import is_op, tensor_of
from torch_armllm.ops.op_call import OpCall

_aten = torch.ops.aten
VIEWS = (_aten.view, _aten.reshape, _aten._unsafe_view, _aten.squeeze)


def by_head(graph: fx.Graph, node: Node) -> Node:
    """Returns a result ``(heads, T, size)`` or ``(1, heads, T, size)`` in the latter shape.

    Calls are inserted at the graph's insertion point.
    """
    shape = tensor_of(node).shape
    if len(shape) == 4:
        return node
    source: Any = node
    while is_op(source, *VIEWS) and tensor_of(source).dim() == 3:
        source = OpCall(source).self
        other = tensor_of(source).shape
        if len(other) == 4 and other[0] == 1 and other[1] == shape[0] and other[3] == shape[2]:
            return source  # type: ignore[no-any-return]
    return insert_call(graph, _aten.unsqueeze.default, node, 0)


def untransposed(graph: fx.Graph, node: Node) -> Node:
    """Returns keys ``(…, size, T)`` as ``(…, T, size)``; an existing transposition is undone."""
    dim = tensor_of(node).dim()
    source = OpCall(node).first
    dims = (OpCall(node).dim0, OpCall(node).dim1) if is_op(node, _aten.transpose) else ()
    if {int(d) % dim for d in dims} == {dim - 2, dim - 1}:
        return source  # type: ignore[no-any-return]
    if is_op(node, _aten.permute):
        order = [int(d) % dim for d in OpCall(node).dims]
        order[-2:] = order[:-3:-1]
        return insert_call(graph, _aten.permute.default, source, order)
    return insert_call(graph, _aten.transpose.int, node, -2, -1)


def unwidened(node: Node, dtype: torch.dtype) -> Node:
    """Returns what a node converted to float32, if it has the given dtype; else the node."""
    if is_op(node, _aten.to, _aten._to_copy) and tensor_of(node).dtype == torch.float32 != dtype:
        source = OpCall(node).self
        return source if tensor_of(source).dtype == dtype else node
    return node


def insert_call(graph: fx.Graph, target: Any, *args: Any) -> Node:
    """Inserts a call, with the result of its fake kernel as metadata."""
    node = graph.call_function(target, args)
    fake: Any = tensor_of(node.all_input_nodes[0])
    with fake.fake_mode, torch.no_grad():
        node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
    return node


def insert_constant(module: fx.GraphModule, before: Node, name: str, tensor: Tensor) -> Node:
    """Adds a tensor to the module, and a node that reads it before another one."""
    count = 0
    while hasattr(module, f"{name}_{count}"):
        count += 1
    module.register_buffer(f"{name}_{count}", tensor)
    with module.graph.inserting_before(before):
        node = module.graph.get_attr(f"{name}_{count}")
    fake: Any = tensor_of(before)
    node.meta["val"] = fake.fake_mode.from_tensor(tensor, static_shapes=True)
    return node
