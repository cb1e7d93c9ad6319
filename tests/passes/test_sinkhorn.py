"""Tests of the pass sinkhorn."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.support.graphs import export, ops
from torch_armllm.passes import clean, sinkhorn
from torch_armllm.passes.lib.context import PassContext

EPS = 1e-6


class Divisions(nn.Module):
    """Divides positive matrices by the sums over one dimension after the other."""

    def __init__(self, *dims: int, size: int = 4) -> None:
        super().__init__()
        self.dims, self.size = dims, size

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sigmoid(x).view(1, -1, self.size, self.size)
        for dim in self.dims:
            x = x / (x.sum(dim=dim, keepdim=True) + EPS)
        return x


def rewritten(module: Divisions) -> list[str]:
    """Returns the ops after the pass, which must not change the result."""
    x = torch.randn(1, 5, module.size**2)
    graph = export(module, x)
    clean.run(graph, PassContext())
    expected = graph(x)
    sinkhorn.run(graph, PassContext())
    graph.recompile()
    torch.testing.assert_close(graph(x), expected, rtol=1e-6, atol=1e-6)
    return ops(graph)


@pytest.mark.parametrize("rounds", [1, 3])
def test_alternating_divisions_become_one_op(rounds: int) -> None:
    found = rewritten(Divisions(-2, *(-1, -2) * rounds))
    assert found[-1] == "armllm::sinkhorn" and "div" not in found


def test_what_precedes_and_follows_stays() -> None:
    found = rewritten(Divisions(-1, -2, -1, -2, -1))
    assert found.count("div") == 2 and found.count("armllm::sinkhorn") == 1


@pytest.mark.parametrize("module", [Divisions(-2, -2, -2), Divisions(-2), Divisions(-2, -1, -2, size=9)])
def test_other_divisions_are_not_changed(module: Divisions) -> None:
    assert "armllm::sinkhorn" not in rewritten(module)
