"""Products with the weight on the left, as in Mamba's time steps: ``W @ xᵀ`` becomes ``linear(x, W)ᵀ``."""

from __future__ import annotations

from torch import fx

from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.passes.lib.graph import aten, call, is_op, is_weight, match, replace_nodes, value


def run(module: fx.GraphModule, context: PassContext) -> int:
    """Rewrites products of a weight and the tokens of one sequence."""
    graph = module.graph

    def linear(node: fx.Node) -> fx.Node | None:
        if not is_op(node, aten.matmul.default) or not is_weight(OpCall(node).self):
            return None
        weight, tokens = OpCall(node).self, OpCall(node).other
        if value(weight).dim() != 2 or value(tokens).dim() != 3:
            return None
        return _transposed(graph, _linear(graph, _transposed(graph, tokens), weight))

    return replace_nodes(graph, linear)


def _linear(graph: fx.Graph, x: fx.Node, weight: fx.Node) -> fx.Node:
    """Inserts a linear layer; torch 2.10's fake kernel of it would make the number of tokens a constant."""
    node = graph.call_function(aten.linear.default, (x, weight))
    node.meta["val"] = value(x).new_empty((*value(x).shape[:-1], value(weight).shape[0]))
    return node


def _transposed(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """``(1, a, b)`` → ``(1, b, a)``; undoes an existing transpose instead of adding one."""
    if (swapped := match(node, aten.transpose.int, dim0=1, dim1=2)) is not None:
        assert isinstance(swapped.self, fx.Node)
        return swapped.self
    return call(graph, aten.transpose.int, node, 1, 2)
