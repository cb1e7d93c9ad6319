"""Rows that are equal because they were expanded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.support.graphs import export, ops
from torch_armllm.passes import PassContext
from torch_armllm.passes.clean import run as clean
from torch_armllm.passes.repeated_rows import run


class Angles(nn.Module):
    """Cosines of three rows of positions; some frequencies are those of another row."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("frequencies", torch.rand(6))

    def forward(self, position_ids: Tensor) -> Tensor:
        rows = position_ids[None].expand(3, position_ids.shape[0], -1)
        angles = rows[..., None].float() * self.frequencies
        if self.kind == "shifted":
            angles = angles + torch.arange(3)[:, None, None, None]
        cos = angles.cos()
        if self.kind == "split":
            parts = cos.split([1, 2, 3], dim=-1)
            return torch.cat([part[row] for row, part in enumerate(parts)], dim=-1)
        out = cos[0]
        if self.kind == "summed":
            return cos.sum(0)
        out[..., 1::3] = cos[1, ..., (2 if self.kind == "other columns" else 1) :: 3]
        return out


@pytest.mark.parametrize("kind", ["equal", "split", "shifted", "summed", "other columns"])
def test_equal_rows_are_computed_once(kind: str) -> None:
    module = Angles(kind)
    positions = torch.arange(7)[None]
    graph = export(module, positions)
    clean(graph, PassContext())
    assert run(graph, PassContext()) == (kind in ("equal", "split"))
    graph.graph.lint()
    graph.recompile()
    for ids in (positions, torch.tensor([[5, 0, 3]])):
        torch.testing.assert_close(graph(ids), module(ids), rtol=0, atol=0)
    if kind in ("equal", "split"):
        assert ops(graph) == ["unsqueeze", "to", "mul", "cos"]
