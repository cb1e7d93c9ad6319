"""Tests of the pass uniform_values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.graphs import export, ops
from torch_armllm.passes import clean, uniform_values
from torch_armllm.passes.lib.context import PassContext


def _rewritten(module: nn.Module, x: Tensor) -> list[str]:
    """Runs the passes on the graph of a module, compares its results, and returns its operators."""
    graph = export(module, x)
    expected = graph(x)
    clean.run(graph, PassContext())
    uniform_values.run(graph, PassContext())
    clean.run(graph, PassContext())
    graph.graph.lint()
    graph.recompile()
    longer = torch.randn(1, 9, 8)
    assert torch.equal(graph(x), expected) and torch.equal(graph(longer), module(longer))
    return ops(graph)


def test_masks_that_hide_nothing_are_removed() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.ones(x.shape[:2], dtype=torch.bool)
            is_image = torch.zeros(x.shape[:2], dtype=torch.long) == 1
            kept = (mask & ~is_image)[..., None]
            x = (x * kept).to(x.dtype)
            x = torch.where(kept.expand_as(x), x, torch.zeros_like(x))
            return x.masked_fill(is_image[..., None], 3.0).relu()

    assert _rewritten(Masked(), torch.randn(1, 4, 8)) == ["relu"]


def test_operands_that_change_something_are_kept() -> None:
    class Changing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            ones = torch.ones(x.shape[:2])[..., None]
            wide = torch.ones(1, x.shape[1], 8) * x[..., :1]  # of another shape than x[..., :1]
            whole = x.long() & torch.ones_like(x, dtype=torch.long)  # the lowest bit
            return torch.add(x, torch.ones_like(x), alpha=2) + (ones + 1) * x + wide + whole

    assert {"mul", "__and__", "add"} <= set(_rewritten(Changing(), torch.randn(1, 4, 8) * 4))


def test_tensors_that_are_written_to_are_not_uniform() -> None:
    class Written(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            factors = torch.ones_like(x)
            factors[..., :1].mul_(3.0)
            return x * factors

    assert "mul" in _rewritten(Written(), torch.randn(1, 4, 8))


def test_dead_writes_are_removed() -> None:
    class Dead(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            counts = torch.zeros(1, x.shape[1], 8)
            counts.scatter_add_(-1, x.argmax(-1, keepdim=True), torch.ones(1, x.shape[1], 1))
            return x.relu()

    assert _rewritten(Dead(), torch.randn(1, 4, 8)) == ["relu"]
