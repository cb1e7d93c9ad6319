"""Tests of rope_probe: any decomposition of a rotation becomes ``rope_``, other functions do not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import torch_armllm.capture.markers.attention  # noqa: F401
from tests.support.graphs import export, ops
from torch_armllm.passes import clean, norm, rope, transpose_last
from torch_armllm.passes.lib.context import PassContext


class Attention(nn.Module):
    """Queries and keys that are rotated before attention by a given function."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("inv_freq", 0.3 ** torch.arange(1, 5).float())

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.kind == "partial":
            front, rest = x[..., :8], x[..., 8:]
            a, b = front.chunk(2, -1)
            return torch.cat([front * cos + torch.cat([-b, a], -1) * sin, rest], -1)
        a, b = x[..., 0:8:2], x[..., 1:8:2]
        cos, sin = cos[..., :4], sin[..., :4]
        turned = (a * cos - b * sin, a * sin + b * cos)
        if self.kind == "backwards":
            turned = (a * cos + b * sin, b * cos - a * sin)
        if self.kind == "unzipped":
            return torch.cat([*turned, x[..., 8:]], -1)
        if self.kind == "not a rotation":
            turned = (a * cos - b * sin, a * cos + b * sin)
        return torch.cat([torch.stack(turned, -1).flatten(-2), x[..., 8:]], -1)

    def forward(self, q: Tensor, k: Tensor, position_ids: Tensor) -> Tensor:
        angles = (position_ids[..., None].float() * self.inv_freq).repeat(1, 1, 2)[:, None]
        cos, sin = angles.cos() * 1.25, angles.sin() * 1.25
        q, k = (self.turn((x + 0.5).transpose(1, 2), cos, sin) for x in (q, k))
        return torch.ops.armllm.attention(q, k, k, 0, 0.25, 0, 0.0, None)


@pytest.mark.parametrize("kind", ["partial", "interleaved", "backwards", "unzipped", "not a rotation"])
def test_equivalent_rotations_are_recognized(kind: str) -> None:
    torch.manual_seed(0)
    q, k, positions = torch.randn(1, 5, 4, 12), torch.randn(1, 5, 2, 12), torch.tensor([[0, 3, 4, 99, 1]])
    graph = export(Attention(kind), q, k, positions)
    expected = graph(q, k, positions)
    found = rope.run(graph, PassContext())
    graph.recompile()
    assert found == (kind != "not a rotation")
    assert ("armllm::rope_" in ops(graph)) == (kind != "not a rotation")
    torch.testing.assert_close(graph(q, k, positions), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("widened", [True, False])
def test_heads_rotated_in_float32_keep_their_dtype(widened: bool) -> None:
    """The op rotates bfloat16 in float32 by itself; heads that are float32 before are rounded after it."""

    class Wide(Attention):
        def forward(self, q: Tensor, k: Tensor, position_ids: Tensor) -> Tensor:
            angles = (position_ids[..., None].float() * self.inv_freq).repeat(1, 1, 2)[:, None]
            first = ((x + 0.5).float() if widened else x.float() + 0.5 for x in (q, k))
            turned = (self.turn(x.transpose(1, 2), angles.cos(), angles.sin()).bfloat16() for x in first)
            return torch.ops.armllm.attention(*turned, k.transpose(1, 2), 0, 0.25, 0, 0.0, None)

    torch.manual_seed(0)
    q, k = torch.randn(1, 5, 4, 12).bfloat16(), torch.randn(1, 5, 2, 12).bfloat16()
    positions = torch.tensor([[0, 3, 4, 99, 1]])
    graph = export(Wide("interleaved"), q, k, positions)
    expected = graph(q, k, positions)
    clean.run(graph, PassContext())
    assert rope.run(graph, PassContext()) == 1
    graph.recompile()
    (node,) = graph.graph.find_nodes(op="call_function", target=torch.ops.armllm.rope_.default)
    assert node.args[0].meta["val"].dtype == (torch.bfloat16 if widened else torch.float32)
    torch.testing.assert_close(graph(q, k, positions), expected, rtol=1e-2, atol=1e-2)


class NormedAttention(Attention):
    """Norms follow the rotation, before or after the heads are transposed."""

    def __init__(self, kind: str, by_token: bool) -> None:
        super().__init__(kind)
        self.by_token = by_token
        self.norm = nn.RMSNorm(12, eps=1e-6)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)

    def turned(self, x: Tensor, angles: Tensor) -> Tensor:
        cos, sin = angles.cos(), angles.sin()
        if self.by_token:
            return self.norm(self.turn(x + 0.5, cos[:, :, None], sin[:, :, None])).transpose(1, 2)
        return self.norm(self.turn((x + 0.5).transpose(1, 2), cos[:, None], sin[:, None]))

    def forward(self, q: Tensor, k: Tensor, position_ids: Tensor) -> Tensor:
        angles = (position_ids[..., None].float() * self.inv_freq).repeat(1, 1, 2)
        return torch.ops.armllm.attention(
            self.turned(q, angles), self.turned(k, angles), k.transpose(1, 2), 0, 0.25, 0, 0.0, None
        )


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("kind", ["partial", "interleaved", "backwards"])
def test_rotations_before_norms_are_recognized(kind: str, by_token: bool) -> None:
    torch.manual_seed(0)
    q, k, positions = torch.randn(1, 5, 4, 12), torch.randn(1, 5, 2, 12), torch.tensor([[0, 3, 4, 99, 1]])
    graph = export(NormedAttention(kind, by_token), q, k, positions)
    expected = graph(q, k, positions)
    for rewrite in (norm, transpose_last, rope):
        assert rewrite.run(graph, PassContext()) == {norm: 2, transpose_last: 0, rope: 1}[rewrite]
    graph.graph.lint()
    graph.recompile()
    names = ops(graph)
    assert names.index("armllm::rope_") < names.index("armllm::rms_norm")
    assert names.count("armllm::rms_norm") == 2
    torch.testing.assert_close(graph(q, k, positions), expected, rtol=1e-4, atol=1e-4)


def test_normed_heads_with_other_readers_are_not_rotated_in_place() -> None:
    class Read(NormedAttention):
        def forward(self, q: Tensor, k: Tensor, position_ids: Tensor) -> Tensor:
            angles = (position_ids[..., None].float() * self.inv_freq).repeat(1, 1, 2)[:, None]
            turned = [self.turn((x + 0.5).transpose(1, 2), angles.cos(), angles.sin()) for x in (q, k)]
            normed = [self.norm(x) for x in turned]
            out = torch.ops.armllm.attention(*normed, k.transpose(1, 2), 0, 0.25, 0, 0.0, None)
            return out + turned[0].transpose(1, 2)

    graph = export(
        Read("partial", False), torch.randn(1, 5, 4, 12), torch.randn(1, 5, 4, 12), torch.arange(5)[None]
    )
    norm.run(graph, PassContext())
    assert rope.run(graph, PassContext()) == 0


def test_split_heads_are_transposed_after_the_split() -> None:
    class Fused(Attention):
        """GPT-NeoX: queries, keys and values of a head are adjacent."""

        def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
            angles = (position_ids[..., None].float() * self.inv_freq).repeat(1, 1, 2)[:, None]
            q, k, v = (x + 0.5).transpose(1, 2).chunk(3, -1)
            q, k = (self.turn(part, angles.cos(), angles.sin()) for part in (q, k))
            return torch.ops.armllm.attention(q, k, v, 0, 0.25, 0, 0.0, None)

    torch.manual_seed(0)
    x, positions = torch.randn(1, 5, 4, 36), torch.tensor([[0, 3, 4, 99, 1]])
    graph = export(Fused("partial"), x, positions)
    expected = graph(x, positions)
    assert transpose_last.run(graph, PassContext()) == 1
    assert rope.run(graph, PassContext()) == 1
    graph.graph.lint()
    graph.recompile()
    torch.testing.assert_close(graph(x, positions), expected, rtol=1e-4, atol=1e-4)


def test_scaled_keys_are_transposed_after_the_multiplication() -> None:
    """Falcon-H1 multiplies its keys by a number after their transpose."""

    class Scaled(Attention):
        def forward(self, q: Tensor, k: Tensor, position_ids: Tensor) -> Tensor:
            angles = (position_ids[..., None].float() * self.inv_freq).repeat(1, 1, 2)[:, None]
            q, k = (q + 0.5).transpose(1, 2), (k + 0.5).transpose(1, 2) * 0.375
            q, k = (self.turn(part, angles.cos(), angles.sin()) for part in (q, k))
            return torch.ops.armllm.attention(q, k, k, 0, 0.25, 0, 0.0, None)

    torch.manual_seed(0)
    q, k, positions = torch.randn(1, 5, 4, 12), torch.randn(1, 5, 2, 12), torch.tensor([[0, 3, 4, 99, 1]])
    graph = export(Scaled("partial"), q, k, positions)
    expected = graph(q, k, positions)
    assert transpose_last.run(graph, PassContext()) == 1
    assert rope.run(graph, PassContext()) == 1
    graph.graph.lint()
    graph.recompile()
    torch.testing.assert_close(graph(q, k, positions), expected, rtol=1e-4, atol=1e-4)
