"""Tests of the pass rope: rotation of queries and keys, and angle tables."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.graphs import export, ops
from torch_armllm.capture.markers import attention  # noqa: F401  (registers the marker op)
from torch_armllm.passes import clean, rope
from torch_armllm.passes.lib.context import PassContext


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class Attention(nn.Module):
    """Two heads of 8 elements with rotary embeddings, before the marker op."""

    def __init__(self, own_angles: bool, scaling: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8))
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)
        self.own_angles, self.scaling = own_angles, scaling

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        if not self.own_angles:
            angle = torch.einsum("bt,f->btf", positions.float(), self.inv_freq).repeat(1, 1, 2)
            return angle.cos(), angle.sin()
        freqs = positions[..., None].float() * self.inv_freq
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos() * self.scaling, emb.sin() * self.scaling

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = (t.to(x.dtype).unsqueeze(1) for t in self.angles(positions))
        q, k, v = (layer(x).view(1, x.shape[1], -1, 8).transpose(1, 2) for layer in (self.q, self.k, self.q))
        q, k = (t * cos + rotate_half(t) * sin for t in (q, k))
        return torch.ops.armllm.attention(q, k, v, 0, 0.3, 0, 0.0, None)


def check(module: nn.Module, table: bool) -> None:
    x, positions = torch.randn(1, 7, 16), torch.arange(3, 10)[None]
    graph = export(module, x, positions)
    clean.run(graph, PassContext())
    before, expected = ops(graph), graph(x, positions)
    assert rope.run(graph, PassContext()) == 1
    graph.graph.lint()
    graph.recompile()
    after = ops(graph)
    assert {"neg", "cat", "cos", "sin"} <= set(before)
    assert "armllm::rope_" in after and "neg" not in after
    assert ("armllm::rope_table" in after) is table and ("cos" in after) is not table
    torch.testing.assert_close(graph(x, positions), expected, atol=2e-5, rtol=2e-5)


def test_rotation_with_known_angles() -> None:
    torch.manual_seed(0)
    check(Attention(own_angles=True, scaling=1.25), table=True)


def test_rotation_whose_cosines_are_joined() -> None:
    class Joined(Attention):
        def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
            freqs = positions[..., None].float() * self.inv_freq
            cos, sin = freqs.cos() * self.scaling, freqs.sin() * self.scaling
            return torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)

    torch.manual_seed(0)
    check(Joined(own_angles=True, scaling=1.25), table=True)


def test_rotation_by_a_product_of_a_column_and_a_row() -> None:
    class Product(Attention):
        def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
            column = self.inv_freq[None, :, None].float().expand(positions.shape[0], -1, 1)
            freqs = (column @ positions[:, None, :].float()).transpose(1, 2)
            emb = torch.cat((freqs, freqs), dim=-1)
            return emb.cos() * self.scaling, emb.sin() * self.scaling

    torch.manual_seed(0)
    check(Product(own_angles=True, scaling=1.25), table=True)


def test_rotation_by_frequencies_that_are_computed() -> None:
    class Learned(Attention):
        def __init__(self) -> None:
            super().__init__(True, 1.25)
            self.alpha = nn.Parameter(torch.randn(4))

        def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
            freqs = positions[..., None].float() * (self.inv_freq.float() * self.alpha.exp())
            emb = torch.cat((freqs, freqs), dim=-1)
            return emb.cos() * self.scaling, emb.sin() * self.scaling

    torch.manual_seed(0)
    check(Learned(), table=True)


def test_rotation_by_the_same_position_on_three_axes() -> None:
    class Axes(Attention):
        def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
            return super().forward(x, position_ids)

        def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
            freqs = positions.expand(3, 1, -1)[..., None].float() * self.inv_freq
            rows = [torch.cat((row, row), -1).split([4, 2, 2], -1) for row in (freqs.cos(), freqs.sin())]
            cos, sin = (torch.cat([part[i] for i, part in enumerate(parts)], -1) for parts in rows)
            return cos, sin

    torch.manual_seed(0)
    check(Axes(own_angles=True), table=True)


class HalvedAttention(Attention):
    """gpt-oss: each angle is stored once, and the halves of a head are rotated separately."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        freqs = positions[..., None].float() * self.inv_freq
        angles = freqs if self.own_angles else torch.einsum("bt,f->btf", positions.float(), self.inv_freq)
        cos, sin = ((f(angles) * self.scaling).to(x.dtype).unsqueeze(1) for f in (torch.cos, torch.sin))
        q, k, v = (layer(x).view(1, x.shape[1], -1, 8).transpose(1, 2) for layer in (self.q, self.k, self.q))
        turned = []
        for t in (q, k):
            a, b = torch.chunk(t, 2, dim=-1)
            turned.append(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1))
        return torch.ops.armllm.attention(*turned, v, 0, 0.3, 0, 0.0, None)


def test_rotation_of_separate_halves() -> None:
    torch.manual_seed(0)
    for own_angles in (True, False):
        module = HalvedAttention(own_angles, 1.25)
        x, positions = torch.randn(1, 7, 16), torch.arange(3, 10)[None]
        graph = export(module, x, positions)
        clean.run(graph, PassContext())
        expected = graph(x, positions)
        assert rope.run(graph, PassContext()) == 1
        graph.recompile()
        after = ops(graph)
        assert "armllm::rope_" in after and "chunk" not in after
        assert ("armllm::rope_table" in after) is own_angles
        torch.testing.assert_close(graph(x, positions), expected, atol=2e-5, rtol=2e-5)


class AxialAttention(Attention):
    """Gemma 4's vision tower: one half of a head turns by some frequencies, and the other by others."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        angles = position_ids[..., None].float() * self.inv_freq
        rows, columns = angles.chunk(2, -1)
        whole = torch.cat([rows, rows, columns, columns], -1)[:, :, None]
        cos, sin = whole.cos().split(4, -1), whole.sin().split(4, -1)
        q, k, v = (layer(x).view(1, x.shape[1], -1, 8) for layer in (self.q, self.k, self.q))
        turned = []
        for t in (q, k):
            parts = [a * b + rotate_half(a) * c for a, b, c in zip(t.split(4, -1), cos, sin, strict=True)]
            turned.append(torch.cat(parts, -1).transpose(1, 2))
        return torch.ops.armllm.attention(*turned, v.transpose(1, 2), 0, 0.3, 0, 0.0, None)


def test_rotation_of_the_halves_of_heads_by_themselves() -> None:
    torch.manual_seed(0)
    check(AxialAttention(True), table=True)


def test_rotation_with_unknown_angles() -> None:
    torch.manual_seed(0)
    check(Attention(own_angles=False), table=False)


def test_queries_with_other_readers_are_not_rotated_in_place() -> None:
    class Shared(Attention):
        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            cos, sin = (t.unsqueeze(1) for t in self.angles(positions))
            plain = self.q(x).view(1, x.shape[1], -1, 8)
            q = plain.transpose(1, 2)
            k = self.k(x).view(1, x.shape[1], -1, 8).transpose(1, 2)
            v = k + 0
            q, k = (t * cos + rotate_half(t) * sin for t in (q, k))
            return torch.ops.armllm.attention(q, k, v, 0, 0.3, 0, 0.0, None) + plain

    graph = export(Shared(True), torch.randn(1, 7, 16), torch.arange(7)[None])
    clean.run(graph, PassContext())
    assert rope.run(graph, PassContext()) == 0


def test_keys_of_two_attentions_are_rotated_once() -> None:
    class Shared(Attention):
        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            cos, sin = (t.to(x.dtype).unsqueeze(1) for t in self.angles(positions))
            q, k = (layer(x).view(1, x.shape[1], -1, 8).transpose(1, 2) for layer in (self.q, self.k))
            q, k = (t * cos + rotate_half(t) * sin for t in (q, k))
            first = torch.ops.armllm.attention(q, k, k, 0, 0.3, 0, 0.0, None)
            other = self.q(first.flatten(2)).view(1, x.shape[1], -1, 8).transpose(1, 2)
            other = other * cos + rotate_half(other) * sin
            return torch.ops.armllm.attention(other, k, k, 1, 0.3, 0, 0.0, None)

    x, positions = torch.randn(1, 7, 16), torch.arange(3, 10)[None]
    graph = export(Shared(True), x, positions)
    clean.run(graph, PassContext())
    expected = graph(x, positions)
    assert rope.run(graph, PassContext()) == 2
    graph.graph.lint()
    graph.recompile()
    assert ops(graph).count("armllm::rope_") == 2 and "neg" not in ops(graph)
    torch.testing.assert_close(graph(x, positions), expected, atol=1e-5, rtol=1e-5)
