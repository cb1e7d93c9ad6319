"""Tests of the pass masked_writes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.graphs import export, ops
from torch_armllm.passes import clean, masked_writes, token_id_tables
from torch_armllm.passes.lib.context import PassContext


class Replacing(nn.Module):
    """Looks up row 0 for placeholder ids, by a copy of the ids that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)

    def forward(self, input_ids: Tensor) -> Tensor:
        is_placeholder = (input_ids == 7) | (input_ids == 9)
        ids = input_ids.clone()
        ids[is_placeholder] = 0
        return self.embed(ids)


def test_ids_written_by_a_mask_become_a_table() -> None:
    ids = torch.tensor([[3, 7, 49, 9, 0, 7]])
    graph = export(Replacing(), ids)
    expected = graph(ids)
    assert "index_put_" in ops(graph)
    clean.run(graph, PassContext())
    assert masked_writes.run(graph, PassContext()) == 1
    assert token_id_tables.run(graph, PassContext()) == 1
    graph.graph.lint()
    graph.recompile()
    assert ops(graph) == ["embedding", "squeeze", "embedding"]
    given = ids.clone()
    assert torch.equal(graph(given), expected) and torch.equal(given, ids)


def test_filling_by_a_mask_leaves_what_it_fills() -> None:
    class Filling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.clone()
            y.masked_fill_(x > 0, 3.0)
            return x + y

    x = torch.randn(1, 5, 4)
    graph = export(Filling(), x)
    expected = x + torch.where(x > 0, 3.0, x)
    clean.run(graph, PassContext())
    assert masked_writes.run(graph, PassContext()) == 1
    graph.recompile()
    assert [name for name in ops(graph) if name.endswith("_")] == []
    assert torch.equal(graph(x.clone()), expected)


def test_writes_that_a_view_sees_are_kept() -> None:
    class Viewed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.clone()
            first = y[..., :1]
            y[x > 0] = 2.0
            return y * first

    x = torch.randn(1, 5, 4)
    graph = export(Viewed(), x)
    expected = graph(x.clone())
    clean.run(graph, PassContext())
    assert masked_writes.run(graph, PassContext()) == 0
    graph.recompile()
    given = x.clone()
    assert torch.equal(graph(given), expected) and torch.equal(given, x)
