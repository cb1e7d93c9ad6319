"""Tests of the pass trailing_rope."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.support.graphs import export, ops
from torch_armllm.capture.markers import attention  # noqa: F401  (registers the marker op)
from torch_armllm.passes import clean, trailing_rope
from torch_armllm.passes.lib.context import PassContext


class Rotated(nn.Module):
    """Normalized heads of 12 elements, the last 8 of which are rotated as in DeepSeek-V4."""

    def __init__(self, by_token: bool, backwards: bool = False, read_again: bool = False) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 100 ** (torch.arange(0, 8, 2) / 8))
        self.weight = nn.Parameter(torch.rand(12))
        self.by_token, self.backwards, self.read_again = by_token, backwards, read_again

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        angles = position_ids[..., None].float() * self.inv_freq
        dim = 2 if self.by_token else 1
        cos, sin = (t.repeat_interleave(2, -1).unsqueeze(dim) for t in (angles.cos(), angles.sin()))
        sin = -sin if self.backwards else sin
        heads = torch.ops.armllm.rms_norm(x.view(1, x.shape[1], 3, 12), self.weight, 1e-6, 0.0)
        heads = heads if self.by_token else heads.transpose(1, 2)
        first, last = heads[..., :-8], heads[..., -8:]
        turned = torch.stack((-last[..., 1::2], last[..., ::2]), -1).flatten(-2)
        result = torch.cat([first, last * cos + turned * sin], -1)
        return result + heads if self.read_again else result


def rewritten(module: Rotated) -> tuple[int, list[str]]:
    """Returns the number of rewrites and the ops after the pass, which must not change the result."""
    torch.manual_seed(0)
    x, position_ids = torch.randn(1, 7, 36), torch.arange(3, 10)[None]
    graph = export(module, x, position_ids)
    clean.run(graph, PassContext())
    expected = graph(x, position_ids)
    count = trailing_rope.run(graph, PassContext())
    graph.graph.lint()
    graph.recompile()
    torch.testing.assert_close(graph(x, position_ids), expected, atol=2e-5, rtol=2e-5)
    return count, ops(graph)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("by_token", [False, True])
def test_last_elements_are_rotated_in_place(by_token: bool, backwards: bool) -> None:
    count, after = rewritten(Rotated(by_token, backwards))
    assert count == 1 and "armllm::rope_" in after and not {"cat", "stack", "neg", "cos"} & set(after)


def test_heads_that_are_read_again_are_copied() -> None:
    assert rewritten(Rotated(False, read_again=True))[0] == 0
