"""Tests of rope_probe: any decomposition of a rotation becomes ``rope_``, other functions do not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import torch_armllm.capture.markers.attention  # noqa: F401
from tests.support.graphs import export, ops
from torch_armllm.passes import rope
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


@pytest.mark.parametrize("kind", ["partial", "interleaved", "unzipped", "not a rotation"])
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
