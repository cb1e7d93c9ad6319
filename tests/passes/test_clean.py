"""Tests of the pass clean, which also removes dead code."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.graphs import export, ops
from torch_armllm.passes import clean
from torch_armllm.passes.lib.context import PassContext


def test_identities_and_dead_code_are_removed() -> None:
    class Idle(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            unused = (x * 2).cumsum(-1)
            del unused
            y = nn.functional.dropout(x.to(torch.float32).contiguous(), 0.5, False)
            return (y * 1.0)[..., 0:].relu()

    x = torch.randn(1, 4, 8)
    graph = export(Idle(), x)
    expected = graph(x)
    assert {"cumsum", "to"} <= set(ops(graph))
    assert clean.run(graph, PassContext()) > 0
    graph.recompile()
    assert ops(graph) == ["relu"]
    assert torch.equal(graph(x), expected)


def test_rounding_conversions_are_kept() -> None:
    class Rounding(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to(torch.bfloat16).to(torch.float32)

    graph = export(Rounding(), torch.randn(1, 4, 8))
    clean.run(graph, PassContext())
    assert ops(graph) == ["to", "to"]


def test_strided_slices_are_kept() -> None:
    class Even(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[..., 0::2]

    x = torch.randn(1, 4, 8)
    graph = export(Even(), x)
    clean.run(graph, PassContext())
    assert torch.equal(graph(x), x[..., 0::2])


def test_in_place_ops_on_private_tensors_become_out_of_place() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            fresh = x + 1
            fresh *= 3.0
            seen = x + 2
            view = seen[..., 1:]
            seen *= 5.0
            return fresh[..., 1:] + view

    x = torch.randn(1, 4, 8)
    graph = export(InPlace(), x)
    expected = graph(x)
    assert ops(graph).count("mul_") == 2
    clean.run(graph, PassContext())
    graph.recompile()
    assert ops(graph).count("mul_") == 1 and ops(graph).count("mul") == 1
    assert torch.equal(graph(x), expected)


def test_in_place_ops_on_views_of_new_tensors_become_out_of_place() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            alone = self.layer(x).view(1, -1, 2, 4)
            alone.mul_(3.0).add_(1.0)
            both = self.layer(x)
            left, right = both[..., :4], both[..., 2:6]
            left.mul_(5.0)
            return alone.flatten(2)[..., :4] + left * right

    x = torch.randn(1, 4, 8)
    graph = export(Views(), x)
    expected = graph(x)
    clean.run(graph, PassContext())
    graph.recompile()
    assert [name for name in ops(graph) if name.endswith("_")] == ["mul_"]
    assert torch.equal(graph(x), expected)


def test_in_place_ops_that_would_widen_are_kept() -> None:
    class Widening(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            half = x.to(torch.bfloat16) * 2
            half.add_(x)
            return half

    x = torch.randn(1, 4, 8)
    graph = export(Widening(), x)
    clean.run(graph, PassContext())
    assert "add_" in ops(graph)
    assert graph(x).dtype == torch.bfloat16


def test_products_with_a_transposed_weight_are_linear_layers() -> None:
    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 8))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.T + torch.matmul(x, self.weight.transpose(0, 1))

    x = torch.randn(1, 4, 8)
    graph = export(Products(), x)
    expected = graph(x)
    clean.run(graph, PassContext())
    graph.recompile()
    assert ops(graph) == ["linear", "linear", "add"]
    torch.testing.assert_close(graph(x), expected)
