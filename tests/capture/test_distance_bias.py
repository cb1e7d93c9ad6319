"""Learned biases of distance: which modules mix profiles, and what becomes of them in a graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.support.graphs import export, ops
from torch_armllm.capture.markers import distance_bias
from torch_armllm.capture.markers.attention import UnsupportedAttention, attention_function

HEADS, SIZE, RANK, EXTENT = 2, 8, 3, 5


class Profiles(nn.Module):
    """Mixes a bias by distance, as Inkling does."""

    beyond = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.rel_extent = EXTENT
        self.proj = nn.Parameter(torch.randn(RANK, EXTENT))

    def forward(self, factors: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        away = (queries[:, None] - keys)[None, None]
        mixed = (factors @ self.proj).transpose(1, 2)
        bias = mixed.gather(-1, away.clamp(0, EXTENT - 1).expand(*mixed.shape[:2], -1, -1))
        return bias.masked_fill((away < 0) | (away >= EXTENT), self.beyond)


class BiasBeyond(Profiles):
    """Has a bias beyond its last profile."""

    beyond = -1.0


class Attention(nn.Module):
    """One layer of attention with such a bias, which a factor of each position scales."""

    def __init__(self, profiles: nn.Module, by_position: bool = True) -> None:
        super().__init__()
        self.layer_idx, self.by_position = 0, by_position
        self.profiles = profiles
        self.qkv = nn.Linear(16, 3 * HEADS * SIZE)
        self.factors = nn.Linear(16, HEADS * RANK)
        self.sink = nn.Linear(16, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        q, k, v = self.qkv(x).view(1, tokens, 3 * HEADS, SIZE).transpose(1, 2).chunk(3, 1)
        positions = torch.arange(tokens)
        bias = self.profiles(self.factors(x).view(1, tokens, HEADS, RANK), positions, positions)
        if self.by_position:
            bias = (bias.float() * (1.0 + positions.float() / 7).view(1, 1, -1, 1)).to(x.dtype)
        sinks = self.sink(x).transpose(1, 2)[..., None]
        if not torch.compiler.is_exporting():
            scores = (q @ k.transpose(2, 3) * 0.3 + bias).masked_fill(
                torch.ones(tokens, tokens).triu(1).bool(), -torch.inf
            )
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
            return (weights @ v).transpose(1, 2)
        return attention_function(self, q, k, v, None, 0.3, position_bias=bias, sinks=sinks)[0]


@pytest.mark.parametrize("by_position", [False, True])
def test_attention_takes_factors_and_profiles(by_position: bool) -> None:
    torch.manual_seed(0)
    layer = Attention(Profiles(), by_position)
    x = torch.randn(1, 11, 16)
    expected = layer(x)
    with distance_bias.mark_distance_biases(layer):
        graph = export(layer, x)
    distance_bias.resolve_biases(graph.graph)
    graph.recompile()
    assert "armllm::attention" in ops(graph)
    assert not {"armllm::distance_bias", "armllm::biased_attention"} & set(ops(graph))
    torch.testing.assert_close(graph(x), expected, rtol=1e-4, atol=1e-5)
    assert "forward" not in vars(layer.profiles)


def test_a_module_that_computes_something_else_stays() -> None:
    layer = Attention(BiasBeyond())
    with distance_bias.mark_distance_biases(layer):
        assert "forward" not in vars(layer.profiles)
        graph = export(layer, torch.randn(1, 11, 16))
    with pytest.raises(UnsupportedAttention, match="adds a learned bias to its scores"):
        distance_bias.resolve_biases(graph.graph)


def test_a_bias_that_is_scaled_by_head_is_refused() -> None:
    class ByHead(Attention):
        def forward(self, x: Tensor) -> Tensor:
            factors = self.factors(x).view(1, -1, HEADS, RANK)
            positions = torch.arange(x.shape[1])
            bias = self.profiles(factors, positions, positions) * torch.arange(HEADS).view(1, -1, 1, 1)
            q, k, v = self.qkv(x).view(1, -1, 3 * HEADS, SIZE).transpose(1, 2).chunk(3, 1)
            return attention_function(self, q, k, v, None, 0.3, position_bias=bias)[0]

    layer = ByHead(Profiles())
    with distance_bias.mark_distance_biases(layer):
        graph = export(layer, torch.randn(1, 11, 16))
    with pytest.raises(UnsupportedAttention, match="adds a learned bias to its scores"):
        distance_bias.resolve_biases(graph.graph)
