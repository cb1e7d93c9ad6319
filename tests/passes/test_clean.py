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
