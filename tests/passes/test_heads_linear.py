"""Tests of the pass heads_linear."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.support.graphs import export, ops
from torch_armllm.passes import fold_constants, heads_linear
from torch_armllm.passes.lib.context import PassContext


class Experts(nn.Module):
    """Two experts that all tokens go through, as Inkling's shared experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 24, 16))
        self.down = nn.Parameter(torch.randn(2, 16, 24))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(1, -1, 16).expand(2, -1, -1)
        hidden = torch.bmm(rows, self.up.transpose(1, 2)).tanh()
        return torch.bmm(hidden, self.down.transpose(1, 2)).sum(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most", [fold_constants.MAX_VALUES, 64], ids=["small", "large"])
def test_products_with_constant_matrices_are_rewritten(
    most: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fold_constants, "MAX_VALUES", most)
    torch.manual_seed(0)
    x = torch.randn(1, 7, 16).to(dtype)
    graph = export(Experts().to(dtype), x)
    expected = graph(x)
    fold_constants.run(graph, PassContext())
    assert heads_linear.run(graph, PassContext()) == 2
    graph.recompile()
    assert ops(graph).count("armllm::dense_heads_linear") == 2 and "bmm" not in ops(graph)
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(graph(x), expected, rtol=bound, atol=bound * float(expected.abs().max()))


def test_products_with_columns_of_tokens_are_rewritten() -> None:
    """The inner layers of Zamba's Mamba heads: the weight is on the left, tokens are the last dimension."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 24, 16))

        def forward(self, x: Tensor) -> Tensor:
            columns = x.transpose(1, 2).reshape(1, 3, 16, -1).transpose(0, 1)
            return torch.matmul(self.weight[:, None], columns).transpose(2, 3)[1]

    torch.manual_seed(0)
    x = torch.randn(1, 7, 48)
    graph = export(Heads(), x)
    expected = graph(x)
    fold_constants.run(graph, PassContext())
    assert heads_linear.run(graph, PassContext()) == 1
    graph.recompile()
    assert "matmul" not in ops(graph) and "armllm::dense_heads_linear" in ops(graph)
    torch.testing.assert_close(graph(x), expected, rtol=1e-5, atol=1e-4)


def test_other_products_are_kept() -> None:
    class Scores(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.bmm(x, x.transpose(1, 2))

    graph = export(Scores(), torch.randn(1, 7, 16))
    assert heads_linear.run(graph, PassContext()) == 0
