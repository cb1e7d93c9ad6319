"""Tests of the passes fold_constants, gelu, norm and transpose_last."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tests.support.graphs import export, ops
from torch_armllm.passes import fold_constants, gelu, norm, transpose_last
from torch_armllm.passes.lib.context import PassContext


class Spelt(nn.Module):
    """GPT-2's and Phi's GELU, a LayerNorm without bias, and an RMSNorm with the weight ``1 + w``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.layer_norm(x, (16,), self.weight + 1, None, 1e-5)
        x = 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
        apart = x - x.mean(-1, keepdim=True)
        scale = torch.rsqrt((x - x.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True) + 1e-5)
        return apart * scale * self.weight


def test_decomposed_gelu_and_norms_become_ops() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 5, 16)
    graph = export(Spelt(), x)
    expected = graph(x)
    assert gelu.run(graph, PassContext()) == 1
    assert norm.run(graph, PassContext()) == 2
    assert fold_constants.run(graph, PassContext()) == 1
    graph.recompile()
    assert ops(graph) == ["armllm::layer_norm", "gelu", "armllm::layer_norm"]
    torch.testing.assert_close(graph(x), expected, rtol=1e-4, atol=1e-4)


class Learned(nn.Module):
    """OPT's positions, which start at 2, and a norm after a transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.norm = nn.RMSNorm(8, eps=1e-6)

    def forward(self, position_ids: Tensor) -> Tensor:
        x = self.table(position_ids + 2).view(1, -1, 2, 8).transpose(1, 2)
        return self.norm(x)


def test_position_offset_is_folded_into_the_table() -> None:
    positions = torch.tensor([[0, 5, 17]])
    graph = export(Learned(), positions)
    expected = graph(positions)
    context = PassContext()
    norm.run(graph, context)
    assert transpose_last.run(graph, context) == 1
    fold_constants.run(graph, context)
    graph.recompile()
    assert ops(graph)[-2:] == ["armllm::rms_norm", "transpose"]
    assert "add" not in ops(graph)
    torch.testing.assert_close(graph(positions), expected)


class Halves(nn.Module):
    """Scales and shifts by the two halves of one weight, as hyper-connections do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self.weight.split(16)
        first, second = self.weight.view(2, 16).unbind(0)
        return x * scale + shift + first - second


def test_parts_of_a_constant_are_folded() -> None:
    x = torch.randn(1, 5, 16)
    graph = export(Halves(), x)
    expected = graph(x)
    assert fold_constants.run(graph, PassContext()) == 5
    graph.recompile()
    assert ops(graph) == ["mul", "add", "add", "sub"]
    assert torch.equal(graph(x), expected)
