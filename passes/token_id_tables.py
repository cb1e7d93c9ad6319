"""Functions of token ids become tables: a placeholder of an image that stands for another id, for example."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import aten, call, constant, is_op, new_constant, value

_UNTAGGED = (aten.where, aten.__or__, aten.__and__)
"""Elementwise as well."""


def _functions(module: fx.GraphModule, ids: Node) -> list[Node]:
    """What is computed from the token ids alone, each for itself."""
    known = {ids}
    found = []
    for node in module.graph.nodes:
        if not (torch.Tag.pointwise in getattr(node.target, "tags", ()) or is_op(node, *_UNTAGGED)):
            continue
        inputs = [n for n in node.all_input_nodes if constant(module, n) is None]
        if inputs and known.issuperset(inputs) and value(node).shape == value(ids).shape:
            known.add(node)
            found.append(node)
    return found


def _vocabulary(module: fx.GraphModule, user: Node, ids: Node) -> int | None:
    """Rows of the table in which a node looks ids up."""
    if is_op(user, aten.embedding.default) and user.args[1] is ids:
        table = constant(module, user.args[0])
    elif is_op(user, torch.ops.armllm.split_embedding.default) and user.args[0] is ids:
        table = constant(module, user.args[2])
    else:
        return None
    return None if table is None else table.shape[0]


def _tabulate(
    module: fx.GraphModule, ids: Node, functions: list[Node], last: Node, size: int
) -> torch.Tensor:
    """``last`` of every id."""
    known: dict[Node, torch.Tensor] = {ids: torch.arange(size)[None]}

    def read(node: Node) -> torch.Tensor:
        tensor = constant(module, node)
        return known[node] if tensor is None else tensor

    for node in functions:
        known[node] = node.target(*fx.map_arg(node.args, read), **fx.map_arg(node.kwargs, read))  # type: ignore[operator]
        if node is last:
            break
    return known[last].reshape(size, 1)


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Rewrites ids that are looked up in an embedding and are not the given ones.

    Returns:
        The number of functions rewritten.
    """
    graph = module.graph
    given = [n for n in graph.nodes if n.op == "placeholder" and n.name == "input_ids"]
    if not given or not isinstance(given[0].meta.get("val"), torch.Tensor):
        return 0
    ids, found = given[0], 0
    functions = _functions(module, ids)
    for node in functions:
        sizes = [_vocabulary(module, user, node) for user in node.users]
        known = [size for size in sizes if size is not None]
        if value(node).dtype != torch.int64 or not known:
            continue
        table = _tabulate(module, ids, functions, node, max(known))
        weight = new_constant(module, node, "ids_by_id", table)
        with graph.inserting_before(node):
            looked_up = call(graph, aten.embedding.default, weight, ids)
            node.replace_all_uses_with(call(graph, aten.squeeze.dim, looked_up, -1))
        found += 1
    graph.eliminate_dead_code()
    return found
