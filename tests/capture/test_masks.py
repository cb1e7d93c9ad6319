"""Windows that a model applies by its mask alone, and the check of a captured graph's results."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, fx, nn

import torch_armllm
from torch_armllm.capture.export import CaptureError, capture
from torch_armllm.capture.markers.attention import UnsupportedAttention
from torch_armllm.capture.markers.masks import MaskedWindows
from torch_armllm.capture.output_check import compare_outputs
from torch_armllm.hf.model_kind import ModelKind, kind_of
from torch_armllm.model_survey.tiny_models import tiny_ids, tiny_model


@pytest.mark.parametrize("family", ["phimoe", "mistral"])
def test_windows_shorter_than_the_prompt_are_kept(family: str) -> None:
    model = tiny_model(family, sliding_window=8)
    ids = tiny_ids(1, 40)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        report = torch_armllm.patch(model, None, progress=False)
        assert report.captured, report.capture_reason
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=1e-3, atol=1e-4)


def marked() -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.ops.armllm.attention.default, (x, x, x, 0, 1.0, 0, 0.0, None))
    return graph


@pytest.mark.parametrize("config", [{"sliding_window": 0}, {"sliding_window": 8, "layer_types": ["full"]}])
def test_masks_that_no_layer_uses_are_ignored(config: dict[str, object]) -> None:
    masks = MaskedWindows()
    masks.record("create_sliding_window_causal_mask", lambda config: None)(SimpleNamespace(**config))
    masks.apply(graph := marked())
    assert [n.args[5] for n in graph.nodes if n.op == "call_function"] == [0]


def test_windows_of_unknown_layers_are_refused() -> None:
    masks = MaskedWindows()
    make = {name: masks.record(name, lambda config: None) for name in MASKS}
    make["create_sliding_window_causal_mask"](SimpleNamespace(sliding_window=8))
    graph = marked()
    masks.apply(graph)
    assert [n.args[5] for n in graph.nodes if n.op == "call_function"] == [8]
    make["create_causal_mask"](SimpleNamespace(sliding_window=8))
    with pytest.raises(UnsupportedAttention, match="a window of 8 tokens"):
        masks.apply(marked())


MASKS = ("create_causal_mask", "create_sliding_window_causal_mask")


class Layer(nn.Module):
    def __init__(self, chaotic: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.chaotic = chaotic

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.linear(x)
        return torch.sin(1e3 * x) if self.chaotic else x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layers = nn.ModuleList([Layer(number >= 4) for number in range(10)])

    def hidden(self, input_ids: Tensor) -> Tensor:
        x = torch.ops.aten.embedding.default(self.embedding.weight, input_ids)
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, input_ids: Tensor, **_: object) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self.hidden(input_ids))


class Graph(nn.Module):
    """The same model, rounded in other places."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = torch.ops.aten.embedding.default(self.model.embedding.weight, input_ids)
        for layer in self.model.layers:
            x = (x.double() + torch.nn.functional.linear(x, layer.linear.weight, layer.linear.bias)).float()
            x = torch.sin(1e3 * x) if layer.chaotic else x
        return x


def test_rounding_that_changes_most_tokens_is_no_difference() -> None:
    torch.manual_seed(0)
    model, ids = Model(), torch.arange(23)[None]
    graph = Graph(model)
    sample = compare_outputs(ModelKind(model, model), fx.symbolic_trace(graph), ids, ids)
    assert sample is not None and sample.rounding > 0.1


@pytest.mark.parametrize("number", [0, 1, 5, 9])
def test_wrong_layers_are_found_behind_such_rounding(number: int) -> None:
    torch.manual_seed(0)
    model, ids = Model(), torch.arange(23)[None]
    graph = Graph(model)
    with torch.no_grad():
        graph.model.layers[number].linear.weight.mul_(1.5)
    assert compare_outputs(ModelKind(model, model), fx.symbolic_trace(graph), ids, ids) is None


def test_models_that_compute_something_else_are_refused() -> None:
    model = tiny_model("llama")
    forward = model.model.rotary_emb.forward

    def counted(x: Tensor, position_ids: Tensor) -> object:
        return forward(x, position_ids if torch.compiler.is_compiling() else 5 * position_ids)

    model.model.rotary_emb.forward = counted
    with pytest.raises(CaptureError, match="computes its own positions"):
        capture(kind_of(model))
