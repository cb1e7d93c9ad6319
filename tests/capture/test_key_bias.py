"""Biases of keys: an element of the key in place of one number for each pair of tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.support.graphs import export, ops
from torch_armllm.capture.markers import distance_bias
from torch_armllm.capture.markers.attention import UnsupportedAttention, attention_function

HEADS, KV_HEADS, SIZE = 6, 2, 8


class Attention(nn.Module):
    """One layer of attention, to whose scores each key adds a number of its own."""

    def __init__(self, scale: float, kind: str = "key") -> None:
        super().__init__()
        self.layer_idx, self.scale, self.kind = 0, scale, kind
        self.q = nn.Linear(16, HEADS * SIZE)
        self.kv = nn.Linear(16, 2 * KV_HEADS * SIZE)
        self.bias = nn.Linear(16, KV_HEADS)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        q = self.q(x).view(1, tokens, HEADS, SIZE).transpose(1, 2)
        k, v = self.kv(x).view(1, tokens, 2 * KV_HEADS, SIZE).transpose(1, 2).chunk(2, 1)
        numbers = torch.exp(self.bias(x)).transpose(1, 2)
        bias = numbers[:, :, None, :] if self.kind != "query" else numbers[..., None]
        bias = bias.expand(-1, -1, tokens, tokens)
        if self.kind == "interleaved":  # head h has the numbers of another group
            bias = bias.repeat(1, HEADS // KV_HEADS, 1, 1)
        else:
            bias = (
                bias[:, :, None].expand(-1, -1, HEADS // KV_HEADS, -1, -1).reshape(1, HEADS, tokens, tokens)
            )
        if self.kind == "both":
            bias = bias * (1.0 + torch.arange(tokens)[:, None])
        if not torch.compiler.is_exporting():
            k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
            hidden = torch.ones(tokens, tokens).triu(1).bool()
            scores = (q @ k.transpose(2, 3) * self.scale + bias).masked_fill(hidden, -torch.inf)
            return (scores.softmax(-1) @ v).transpose(1, 2)
        return attention_function(self, q, k, v, bias, self.scale)[0]


@pytest.mark.parametrize("scale", [SIZE**-0.5, 1.0, 0.017, 30.0])
def test_keys_get_an_element(scale: float) -> None:
    torch.manual_seed(0)
    layer, x = Attention(scale), torch.randn(1, 11, 16)
    graph = export(layer, x)
    assert "armllm::biased_attention" in ops(graph)
    assert distance_bias.resolve_biases(graph.graph)
    graph.graph.lint()
    graph.recompile()
    (node,) = [n for n in graph.graph.nodes if n.target is torch.ops.armllm.attention.default]
    tokens = node.args[0].meta["val"].shape[2]
    assert isinstance(tokens, torch.SymInt) and tokens.node.expr.is_symbol  # not the sample's number
    assert [x.meta["val"].shape[1::2] for x in node.args[:3]] == [
        (HEADS, SIZE + 1),
        (KV_HEADS, SIZE + 1),
        (KV_HEADS, SIZE),
    ]
    for length in (11, 2, 30):
        x = torch.randn(1, length, 16)
        torch.testing.assert_close(graph(x), layer(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["query", "interleaved", "both"])
def test_other_biases_are_refused(kind: str) -> None:
    graph = export(Attention(0.3, kind), torch.randn(1, 11, 16))
    with pytest.raises(UnsupportedAttention, match="or than the key"):
        distance_bias.resolve_biases(graph.graph)


def test_masks_of_other_shapes_are_refused() -> None:
    q = torch.randn(1, 2, 5, 8)
    for mask in (torch.zeros(5, 5), torch.ones(1, 1, 5, 5, dtype=torch.bool)):
        with pytest.raises(UnsupportedAttention, match="builds its own attention mask"):
            attention_function(Attention(0.3), q, q, q, mask)
