"""Tests of the recognition of attention that a model computes by matrix products and a softmax."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from torch_armllm.capture.counted_positions import use_position_ids
from torch_armllm.capture.eager_attention import mark_attention, number_layers
from torch_armllm.capture.export import capture, weights_as_attributes
from torch_armllm.capture.markers.attention import EVERY, UnsupportedAttention, ahead_of
from torch_armllm.capture.token_mixing import mixes_tokens
from torch_armllm.hf.model_kind import kind_of
from torch_armllm.model_survey.tiny_models import tiny_ids, tiny_model
from torch_armllm.ops.op_call import OpCall

HEADS, SIZE, LONGEST = 3, 8, 64


class Attention(nn.Module):
    """Attention whose scores are changed by a function of the scores and the number of tokens."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(50, HEADS * SIZE)
        self.qkv = nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE)
        self.distances = nn.Embedding(2 * LONGEST, HEADS)
        self.register_buffer("mask", torch.ones(LONGEST, LONGEST).tril().bool())
        self.register_buffer("band", torch.ones(LONGEST, LONGEST).tril().triu(-11).bool())
        self.register_buffer("slopes", torch.tensor([0.5, 0.3, 0.0625]))

    def change(self, scores: Tensor, q: Tensor, k: Tensor, ids: Tensor, positions: Tensor) -> Tensor:
        length = scores.shape[-1]
        row = torch.arange(length)
        distance = row[None] - row[:, None]
        mask = self.mask[:length, :length]
        if self.kind == "whole":
            return scores
        if self.kind == "next":
            return scores.masked_fill(distance > 1, -torch.inf)
        if self.kind == "buffer":
            return torch.where(mask, scores / math.sqrt(SIZE), torch.finfo(scores.dtype).min)
        if self.kind == "positions":
            seen = positions[:, None, :, None] >= positions[:, None, None]
            return scores * 0.7 + torch.where(seen, 0.0, -1e30).to(scores.dtype)
        if self.kind == "window of a buffer":
            return torch.where(self.band[:length, :length], scores, -1e30)
        if self.kind == "window of numbers":
            return scores.masked_fill((distance > 0) | (distance < -13), -torch.inf)
        if self.kind == "short window":
            return scores.masked_fill((distance > 0) | (distance <= -4), -torch.inf)
        if self.kind == "capped":
            scores = 2.0 * torch.tanh(scores / 2.0)
        scores = scores.masked_fill(distance > 0, -torch.inf)
        if self.kind == "slopes":
            return scores + self.slopes[:, None, None] * row
        if self.kind == "learned bias":
            return scores + self.distances(distance + LONGEST).permute(2, 0, 1)
        if self.kind == "quadratic bias":
            return scores - 0.1 * distance**2
        if self.kind == "two products":
            return scores + (q + 0.1) @ k.transpose(2, 3)
        if self.kind == "ids":
            return scores + (ids % 7)[:, None, None] * 0.5
        return scores

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.table(input_ids)
        q, k, v = (p.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        scores = self.change(q @ k.transpose(2, 3), q, k, input_ids, position_ids)
        weights = nn.functional.dropout(scores.softmax(-1), 0.1, self.training)
        return x + (weights @ v).transpose(1, 2).flatten(2)


def exported(kind: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, fx.GraphModule]:
    torch.manual_seed(0)
    model = Attention(kind).to(dtype).eval()
    tokens = torch.export.Dim("tokens", min=2, max=LONGEST - 1)
    inputs = (torch.zeros(1, 7, dtype=torch.long), torch.arange(7)[None])
    with torch.no_grad():
        program = torch.export.export(model, inputs, dynamic_shapes=({1: tokens}, {1: tokens}), strict=False)
    return model, weights_as_attributes(program).graph_module


RECOGNIZED: dict[str, tuple[float, int]] = {
    "buffer": (SIZE**-0.5, 0),
    "positions": (0.7, 0),
    "window of a buffer": (1.0, 12),
    "window of numbers": (1.0, 14),
    "short window": (1.0, 4),
    "slopes": (1.0, 0),
    "whole": (1.0, 0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", RECOGNIZED)
@torch.no_grad()
def test_attention_is_recognized(kind: str, dtype: torch.dtype) -> None:
    model, graph = exported(kind, dtype)
    assert mark_attention(graph) == 1
    (marker,) = [n for n in graph.graph.nodes if n.target is torch.ops.armllm.attention.default]
    scale, window = RECOGNIZED[kind]
    call = OpCall(marker)
    assert call.layer == 0 and call.scale == pytest.approx(scale, rel=1e-9) and call.window == window
    assert not call.given & {"softcap", "sinks"}
    slopes = call.alibi_slopes
    assert (slopes is not None) == (kind == "slopes")
    if slopes is not None:  # the model's own, without the rounding of a softmax
        assert torch.equal(graph.get_buffer(slopes.target), model.slopes.float())
    assert ahead_of(marker) == (EVERY if kind == "whole" else 0)
    assert not any("softmax" in str(n.target) for n in graph.graph.nodes)
    ids, positions = torch.randint(0, 50, (1, 40)), torch.arange(40)[None]
    expected = model(ids, positions)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(graph(ids, positions), expected, rtol=tolerance, atol=tolerance)


UNSUPPORTED = {
    "next": "attends to some of the later tokens only",
    "learned bias": "adds a learned bias to its scores",
    "quadratic bias": "adds a bias to its scores that is not linear in the distance",
    "two products": "adds 2 products to its scores",
    "ids": "adds a bias to its scores",
    "capped": "computes something else than attention",
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_other_attention_is_refused_by_name(kind: str) -> None:
    _, graph = exported(kind)
    with pytest.raises(UnsupportedAttention, match=f"Attention.*{UNSUPPORTED[kind]}"):
        mark_attention(graph)


def test_layers_are_numbered_in_order() -> None:
    _, graph = exported("buffer")
    mark_attention(graph)
    (marker,) = [n for n in graph.graph.nodes if n.target is torch.ops.armllm.attention.default]
    with graph.graph.inserting_after(marker):
        graph.graph.node_copy(marker)
    number_layers(graph)
    markers = [n for n in graph.graph.nodes if n.target is torch.ops.armllm.attention.default]
    assert [n.args[3] for n in markers] == [0, 1]


class Counting(nn.Module):
    """Adds counted positions, from 0 or from a later number."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first
        self.table = nn.Embedding(50, 8)
        self.positions = nn.Embedding(90, 8)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        length = input_ids.shape[1]
        counted = torch.arange(self.first, self.first + length)
        return (
            self.table(input_ids) + self.positions(counted) + torch.arange(length).to(torch.float32)[:, None]
        )


@pytest.mark.parametrize("first", [0, 5])
def test_counted_positions_become_position_ids(first: int) -> None:
    torch.manual_seed(0)
    model = Counting(first).eval()
    tokens = torch.export.Dim("tokens", min=2, max=80)
    inputs: Any = (torch.zeros(1, 7, dtype=torch.long), torch.arange(7)[None])
    program = torch.export.export(model, inputs, dynamic_shapes=({1: tokens}, {1: tokens}), strict=False)
    graph = weights_as_attributes(program).graph_module
    assert mixes_tokens(graph, 50)
    use_position_ids(graph)
    assert mixes_tokens(graph, 50) == (first > 0)  # other numbers stay, and are found
    ids = torch.randint(0, 50, (1, 9))
    assert torch.equal(graph(ids, torch.arange(9)[None]), model(ids, None))


FAMILIES = {
    "bloom": {},
    "codegen": {},
    "gpt_neo": {"window_size": 9},
    "gpt_neox_japanese": {},
    "gptj": {},
    "megatron-bert": {},
    "mpt": {"n_heads": 2},
    "openai-gpt": {},
    "rembert": {},
    "roformer": {},
    "xglm": {},
}


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_families_are_captured(family: str) -> None:
    model = tiny_model(family, **FAMILIES[family])
    graph = capture(kind_of(model)).graph_module
    layers = [n.args[3] for n in graph.graph.nodes if n.target is torch.ops.armllm.attention.default]
    assert layers == [0, 1]
    ids = tiny_ids(1, 33)
    expected = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(graph(ids, torch.arange(33)[None]), expected, rtol=1e-4, atol=1e-4)


def test_attention_of_layers_that_share_a_module_needs_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zamba's modules are shared, and call transformers' interface without a number of their layer."""
    monkeypatch.setattr("torch_armllm.capture.export._exported_with_own_attention", pytest.fail)
    graph = capture(kind_of(tiny_model("zamba"))).graph_module
    nodes = graph.graph.find_nodes(op="call_function", target=torch.ops.armllm.attention.default)
    assert [node.args[3] for node in nodes] == [0, 1]
