"""Tests of the pass lookups: indexing of constant tables and by constant indices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.support.graphs import export, ops
from torch_armllm.passes import clean, lookups
from torch_armllm.passes.lib.context import PassContext


class Lookup(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table = nn.Parameter(torch.randn(9, 6))
        self.register_buffer("numbers", torch.arange(40)[None] * 5 % 9)
        self.register_buffer("kinds", torch.full((1, 1 << 20), 2))
        self.register_buffer("others", torch.arange(1 << 20)[None] % 9)
        self.register_buffer("adjacent", torch.tensor([1, 2]))
        self.register_buffer("last", torch.tensor([-2]))
        self.register_buffer("apart", torch.tensor([0, 2]))

    def forward(self, ids: Tensor) -> Tensor:
        rows = torch.embedding(self.table, ids % 9)
        if self.kind == "rows":
            return self.table[ids % 9] * 2.0
        if self.kind == "by another table":
            kinds = torch.gather(self.numbers, 1, ids).expand(1, ids.shape[1])
            return torch.embedding(self.table, kinds)
        if self.kind == "the same row":
            return rows + torch.embedding(self.table, torch.zeros(1, ids.shape[1], dtype=torch.long))
        if self.kind == "the first of equal ids":
            return rows + torch.embedding(self.table, self.kinds[:, : ids.shape[1]].expand(1, -1))
        if self.kind == "the first of other ids":
            return rows + torch.embedding(self.table, self.others[:, : ids.shape[1]])
        if self.kind == "shifted ids":
            return rows + torch.embedding(self.table, (((ids % 6)[0] - 1)[None] + 3) - 0)
        if self.kind == "shifted ids of a row":
            return rows * torch.embedding(self.table, (ids % 6)[0] + 2)
        if self.kind == "ids before the table":
            return rows + torch.embedding(self.table, ids.clamp(1, 8) - 1)
        heads = rows.view(1, -1, 3, 2)
        return heads[:, :, getattr(self, self.kind)] * 2.0


EXPECTED = {
    "rows": ("index", "embedding"),
    "by another table": ("gather", "embedding"),
    "the same row": ("zeros", "expand"),
    "the first of equal ids": ("slice", "expand"),
    "shifted ids": ("sub", "embedding"),
    "shifted ids of a row": ("add", "embedding"),
    "adjacent": ("index", "slice"),
    "last": ("index", "slice"),
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_lookup_is_rewritten(kind: str) -> None:
    torch.manual_seed(0)
    module, ids = Lookup(kind), torch.tensor([[3, 0, 39, 8, 17]])
    graph = export(module, ids)
    gone, new = EXPECTED[kind]
    assert gone in ops(graph)
    clean.run(graph, PassContext())
    assert lookups.run(graph, PassContext()) == 1
    graph.graph.lint()
    graph.recompile()
    assert gone not in ops(graph) and new in ops(graph)
    for tokens in (ids, torch.tensor([[1, 38]])):
        assert torch.equal(graph(tokens), module(tokens))


@pytest.mark.parametrize("kind", ["the first of other ids", "ids before the table"])
def test_other_ids_are_left(kind: str) -> None:
    module, ids = Lookup(kind), torch.tensor([[3, 0, 8]])
    graph = export(module, ids)
    assert lookups.run(graph, PassContext()) == 0
    assert ops(graph).count("embedding") == 2


def test_entries_that_are_not_adjacent_are_left() -> None:
    module, ids = Lookup("apart"), torch.tensor([[3, 0, 8]])
    graph = export(module, ids)
    assert lookups.run(graph, PassContext()) == 0
    assert "index" in ops(graph)
