"""Tests of the reasons why a model cannot be captured: they name the layer and what it does."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from torch_armllm.capture.export_errors import export_reason
from torch_armllm.capture.token_mixing import first_mixing_node, mixes_tokens


class Layer(nn.Module):
    """A layer that does one thing that cannot be exported."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "branches" and x.shape[1] > 64:
            return x * 2
        if self.kind == "fixed":
            return x.reshape(1, 7, -1)
        if self.kind == "counts" and int((x > 0).sum()) > 3:
            return x * 2
        if self.kind == "raises":
            raise KeyError("no such state")
        return x


class Body(nn.Module):
    """Embeddings and two layers, of which the second is at fault."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)
        self.layers = nn.ModuleList([Layer(""), nn.Sequential(Layer(kind))])

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


REASONS = {
    "branches": r"^Layer, such as layers\.0 \(line \d+ of its code\) depends on the number of tokens",
    "fixed": r"^Body depends on the number of tokens in its choice of operators",
    "counts": r"^layers\.1\.0 \(Layer\) chooses its operators by values that it computes",
    "raises": r"^layers\.1\.0 \(Layer\) cannot be exported: KeyError: 'no such state'",
}


@pytest.mark.parametrize("kind", REASONS)
def test_reason_names_the_layer(kind: str) -> None:
    model = Body(kind).eval()
    tokens = torch.export.Dim("tokens", min=2, max=1000)
    inputs = (torch.zeros(1, 7, dtype=torch.long), torch.arange(7)[None])
    with pytest.raises(Exception, match=".") as caught:
        torch.export.export(model, inputs, dynamic_shapes=({1: tokens}, {1: tokens}), strict=False)
    reason = export_reason(caught.value, model)  # type: ignore[arg-type]
    found = re.search(REASONS[kind], reason)
    assert found, reason
    assert "TORCH_LOGS" not in reason


class Mixing(nn.Module):
    """Adds the mean of all tokens."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = torch.cos(position_ids[..., None] * 0.1) + input_ids[..., None]
        shifted = x * 2
        return shifted + shifted.roll(1, 1)


def test_first_mixing_node_is_found() -> None:
    graph = torch.fx.symbolic_trace(Mixing())
    assert mixes_tokens(graph, 50)
    node = first_mixing_node(graph, 50)
    assert node is not None
    assert node.target == "roll"
