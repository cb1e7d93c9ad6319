"""Tests of the pass token_id_tables."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.graphs import export, ops
from torch_armllm.passes import token_id_tables
from torch_armllm.passes.lib.context import PassContext
from torch_armllm.plan.lower import lower
from torch_armllm.plan.native import NativePlan
from torch_armllm.plan.placed_program import lay_out
from torch_armllm.plan.step import StepInputs


class Replacing(nn.Module):
    """Replaces placeholder ids by the padding id, as multimodal models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)

    def forward(self, input_ids: Tensor) -> Tensor:
        placeholder = (input_ids == 7) | (input_ids == 9)
        return self.embed(torch.where(placeholder, 0, input_ids)) + self.embed(input_ids)


def test_function_of_token_ids_becomes_a_table() -> None:
    ids = torch.tensor([[3, 7, 49, 9, 0, 7]])
    graph = export(Replacing(), ids)
    expected = graph(ids)
    assert token_id_tables.run(graph, PassContext()) == 1
    graph.graph.lint()
    graph.recompile()
    assert ops(graph) == ["embedding", "squeeze", "embedding", "embedding", "add"]
    assert torch.equal(graph(ids), expected)


def test_table_lookup_is_lowered_natively() -> None:
    ids = torch.tensor([[3, 7, 49, 9, 0, 7]])
    graph = export(Replacing(), ids)
    expected = graph(ids)
    token_id_tables.run(graph, PassContext())
    assert len(lower(graph).instructions) == 4
    none = torch.zeros(0, dtype=torch.int32)
    step = StepInputs(ids, ids, ids[0], none, none, none, 0, ())  # type: ignore[arg-type]
    assert torch.equal(NativePlan(lay_out(lower(graph))).run(step), expected[0])


class SpecialRows(nn.Module):
    """Looks up the last ids of its vocabulary in a smaller table, as Gemma 3n."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.special = nn.Embedding(50, 16), nn.Embedding(5, 16)

    def forward(self, input_ids: Tensor) -> Tensor:
        is_special = torch.logical_and(input_ids >= 45, input_ids < 50)
        special = self.special(torch.where(is_special, input_ids, 49) - 45)
        return torch.where(is_special.unsqueeze(-1), special, self.embed(input_ids) * 3.0)


def test_masks_of_token_ids_become_tables() -> None:
    ids = torch.tensor([[3, 45, 49, 9, 0, 44]])
    graph = export(SpecialRows(), ids)
    expected = graph(ids)
    assert token_id_tables.run(graph, PassContext()) == 2
    graph.graph.lint()
    graph.recompile()
    assert "logical_and" not in ops(graph) and torch.equal(graph(ids), expected)
    none = torch.zeros(0, dtype=torch.int32)
    step = StepInputs(ids, ids, ids[0], none, none, none, 0, ())  # type: ignore[arg-type]
    assert torch.equal(NativePlan(lay_out(lower(graph))).run(step), expected[0])


def test_reductions_over_tokens_are_kept() -> None:
    class Counting(Replacing):
        def forward(self, input_ids: Tensor) -> Tensor:
            return self.embed((input_ids == 7).long().cumsum(-1))

    graph = export(Counting(), torch.tensor([[3, 7, 49]]))
    assert token_id_tables.run(graph, PassContext()) == 0
    assert "cumsum" in ops(graph)
