"""Functions of token ids become lookup tables, for example the replacement of image placeholders."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import aten, call, constant, is_op, match, new_constant, value

_UNTAGGED = (aten.where, aten.__or__, aten.__and__)
"""Elementwise ops without PyTorch's pointwise tag."""


def _functions(module: fx.GraphModule, ids: Node) -> list[Node]:
    """Returns the nodes that are elementwise functions of the token ids."""
    elementwise = {ids}
    functions = []
    for node in module.graph.nodes:
        if not (torch.Tag.pointwise in getattr(node.target, "tags", ()) or is_op(node, *_UNTAGGED)):
            continue
        inputs = [n for n in node.all_input_nodes if constant(module, n) is None]
        if inputs and elementwise.issuperset(inputs) and value(node).shape == value(ids).shape:
            elementwise.add(node)
            functions.append(node)
    return functions


def _table_rows(module: fx.GraphModule, user: Node, ids: Node) -> int | None:
    """Returns the number of rows of the embedding that reads the ids; None if the node is no embedding."""
    if is_op(user, aten.embedding.default) and OpCall(user).indices is ids:
        table = constant(module, OpCall(user).weight)
    elif is_op(user, torch.ops.armllm.split_embedding.default) and OpCall(user).ids is ids:
        table = constant(module, OpCall(user).rest)
    else:
        return None
    return None if table is None else table.shape[0]


def _most_rows(module: fx.GraphModule, ids: Node) -> int:
    """Returns the number of rows of the largest embedding that reads the ids; 0 if none does."""
    sizes = (_table_rows(module, user, ids) for user in ids.users)
    return max([0, *(size for size in sizes if size is not None)])


def _tabulate(
    module: fx.GraphModule, ids: Node, functions: list[Node], last: Node, size: int
) -> torch.Tensor:
    """Evaluates the function ``last`` for every token id."""
    values: dict[Node, torch.Tensor] = {ids: torch.arange(size)[None]}

    def read(node: Node) -> torch.Tensor:
        tensor = constant(module, node)
        return values[node] if tensor is None else tensor

    for node in functions:
        values[node] = node.target(*fx.map_arg(node.args, read), **fx.map_arg(node.kwargs, read))  # type: ignore[operator]
        if node is last:
            break
    return values[last].reshape(size, 1)


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Rewrites embedding indices that are functions of the input ids."""
    graph = module.graph
    inputs = [n for n in graph.nodes if n.op == "placeholder" and n.name == "input_ids"]
    if not inputs or not isinstance(inputs[0].meta.get("val"), torch.Tensor):
        return 0
    ids = inputs[0]
    functions = _functions(module, ids)
    vocabulary = _most_rows(module, ids)
    tables = {}
    for node in functions:
        is_mask = value(node).dtype == torch.bool and not node.users.keys() <= set(functions)
        num_rows = vocabulary if is_mask else _most_rows(module, node)
        if num_rows and (is_mask or value(node).dtype == torch.int64):
            tables[node] = _tabulate(module, ids, functions, node, vocabulary or num_rows)
    for node, table in tables.items():
        is_mask = table.dtype == torch.bool
        weight = new_constant(module, node, "ids_by_id", table.float() if is_mask else table)
        with graph.inserting_before(node):
            looked_up = call(graph, aten.embedding.default, weight, ids)
            result = call(graph, aten.gt.Scalar, looked_up, 0.5) if is_mask else looked_up
            for user in list(node.users):  # plans keep no masks, so none is between this and what reads it
                if is_mask and match(user, aten.unsqueeze.default, dim=-1):
                    user.replace_all_uses_with(result)
            node.replace_all_uses_with(call(graph, aten.squeeze.dim, result, -1))
    graph.eliminate_dead_code()
    return len(tables)
