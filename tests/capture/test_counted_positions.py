"""Tests of numbers that a model counts over its tokens: a step reads positions instead."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.graphs import export, ops
from tests.support.parity import IDS, differences, expected, steps
from torch_armllm.capture.counted_positions import use_position_ids
from torch_armllm.model_survey.tiny_models import tiny_model


class Counting(nn.Module):
    """Counts tokens for a temperature, and for indices of rows."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        numbers = torch.arange(input_ids.shape[1])
        temperature = torch.log1p(torch.floor(((numbers + 2).float() + 1) / 3))
        rows = input_ids[0, torch.arange(input_ids.shape[1])]
        return temperature + rows


def test_only_numbers_that_become_floats_are_positions() -> None:
    ids, positions = torch.tensor([[3, 5, 7, 9]]), torch.tensor([[4, 5, 30, 31]])
    graph = export(Counting(), ids, positions)
    assert use_position_ids(graph, first=2, indices=False) == 1
    graph.graph.lint()
    graph.recompile()
    assert ops(graph).count("arange") == 1
    found = graph(ids, positions)[None] if graph(ids, positions).dim() == 1 else graph(ids, positions)
    wanted = torch.log1p(torch.floor((positions[0] - 2 + 2 + 1.0) / 3)) + ids[0]
    torch.testing.assert_close(found.flatten(), wanted)


def test_temperature_of_attention_follows_positions() -> None:
    """Llama 4 counted the tokens of a step: chunks and batches had the temperature of other positions."""
    import torch_armllm

    model = tiny_model("llama4_text", floor_scale=4, attn_scale=0.9, attention_chunk_size=64)
    wanted = expected(model)
    report = torch_armllm.patch(model, None, progress=False)
    assert report.captured, report.capture_reason
    assert IDS.shape[1] > 4 * 4
    for name, (_, largest) in differences(steps(model), wanted).items():
        assert largest < 3e-4, name
