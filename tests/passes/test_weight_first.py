"""Tests of the pass weight_first."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.graphs import export, ops
from torch_armllm.passes import weight_first
from torch_armllm.passes.lib.context import PassContext


class TimeSteps(nn.Module):
    """Jamba's time steps, whose weight is multiplied from the left."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight @ x.transpose(1, 2)).tanh()


def test_products_become_linear_layers_of_any_number_of_tokens() -> None:
    torch.manual_seed(0)
    graph = export(TimeSteps(), torch.randn(1, 7, 8))
    inputs = [torch.randn(1, tokens, 8) for tokens in (7, 1, 12)]
    expected = [graph(x) for x in inputs]
    assert weight_first.run(graph, PassContext()) == 1
    graph.graph.lint()
    graph.recompile()
    assert "linear" in ops(graph) and "matmul" not in ops(graph)
    for x, result in zip(inputs, expected, strict=True):
        torch.testing.assert_close(graph(x), result, rtol=1e-5, atol=1e-5)
    (linear,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    tokens = linear.meta["val"].shape[1]
    assert isinstance(tokens, torch.SymInt) and tokens.node.expr.free_symbols, "it is a constant"
