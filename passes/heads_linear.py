"""Products of each token with several constant matrices become ``dense_heads_linear``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import aten, call, constant, is_op, new_constant, replace_nodes, value


def _by_token(
    graph: fx.Graph, node: fx.Node, weight: Tensor
) -> tuple[fx.Node, Tensor, Callable[[fx.Node], fx.Node]]:
    """Returns the tokens ``(T, n, in)`` of a product and the matrices ``(n, out, in)``.

    The last result is a function that gives the product ``(T, n, out)`` the shape of the node's own.
    """
    if is_op(node, aten.bmm.default):
        by_token = call(graph, aten.transpose.int, OpCall(node).self, 0, 1)
        return by_token, weight.transpose(1, 2), lambda out: call(graph, aten.transpose.int, out, 0, 1)
    columns = call(
        graph, aten.select.int, call(graph, aten.permute.default, OpCall(node).other, [3, 1, 0, 2]), 1, 0
    )

    def as_columns(out: fx.Node) -> fx.Node:
        return call(graph, aten.permute.default, call(graph, aten.unsqueeze.default, out, 1), [2, 1, 3, 0])

    return columns, weight[:, 0], as_columns


def _weight(module: fx.GraphModule, node: fx.Node) -> Tensor | None:
    """Returns the constant of a product with tokens; None if a node is no such product."""
    if is_op(node, aten.bmm.default):
        tokens, weight = OpCall(node).self, OpCall(node).mat2
    elif is_op(node, aten.matmul.default) and value(node).dim() == 4 and value(node).shape[1] == 1:
        weight, tokens = OpCall(node).self, OpCall(node).other
    else:
        return None
    fits = isinstance(tokens, fx.Node) and isinstance(value(tokens).shape[0], int)
    matrices = constant(module, weight)
    same = matrices is not None and fits and matrices.shape[:-2] == value(tokens).shape[:-2]  # type: ignore[arg-type]
    return matrices if same else None


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Rewrites products of tokens and several constant matrices, as in shared experts and in Zamba's heads.

    These are ``bmm`` of tokens ``(n, T, in)`` and a constant ``(n, in, out)``, and ``matmul`` of a constant
    ``(n, 1, out, in)`` and tokens ``(n, 1, in, T)``.
    """
    graph = module.graph

    def linear(node: fx.Node) -> fx.Node | None:
        if (weight := _weight(module, node)) is None:
            return None
        by_token, matrices, as_before = _by_token(graph, node, weight)
        held = new_constant(module, node, "matrices", matrices.contiguous())
        return as_before(call(graph, torch.ops.armllm.dense_heads_linear.default, by_token, held))

    return replace_nodes(graph, linear)
