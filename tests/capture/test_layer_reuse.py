"""Tests of LayerReuse: the graph must equal the export of all layers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import transformers

from tests.support.models import tiny, token_ids
from torch_armllm import Recipe, quantize
from torch_armllm.capture.export import CapturedGraph, _export, capture
from torch_armllm.capture.layer_reuse import LayerReuse, LayersDiffer
from torch_armllm.capture.markers.attention import IMPLEMENTATION
from torch_armllm.hf.model_kind import kind_of

DEEP: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 3},
    "gpt2": {"n_layer": 3},
    "gemma3_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2],
    },
    "qwen3_moe": {"num_hidden_layers": 3, "mlp_only_layers": [0]},
}


def _forms(captured: CapturedGraph) -> list[tuple[Any, ...]]:
    """Returns the graph's operations in order, without node names."""
    known: dict[Any, int] = {}

    def numbered(arg: Any) -> Any:
        if isinstance(arg, torch.fx.Node):
            weight = captured.names.get(str(arg.target)) if arg.op == "get_attr" else None
            return weight or known.get(arg)
        return [numbered(a) for a in arg] if isinstance(arg, list | tuple) else arg

    forms = []
    for node in captured.graph_module.graph.nodes:
        known[node] = len(known)
        if node.op == "call_function":
            forms.append((node.target, str(numbered(node.args)), str(node.kwargs)))
    return forms


def _exported(model: Any) -> list[int]:
    """Returns the exported layers; asserts that the model is restored afterwards."""
    called: list[int] = []
    folded = LayerReuse(model.base_model)
    with folded.export_once():
        graph = _export(kind_of(model.base_model), IMPLEMENTATION).graph_module.graph
    for node in graph.nodes:
        if node.target is torch.ops.armllm.layer_begin.default:
            called.append(node.args[1])
    assert all("forward" not in vars(m) for m in model.modules())
    assert all(isinstance(vars(m).get("layer_idx", 0), int) for m in model.modules())
    return called


@pytest.mark.parametrize(
    ("family", "quantized"), [*((family, False) for family in DEEP), ("llama", True), ("qwen3_moe", True)]
)
def test_graph_equals_the_export_of_all_layers(family: str, quantized: bool) -> None:
    model = tiny(family, **DEEP[family])
    if quantized:
        quantize(model, Recipe(importance=False))
    wanted = _export(kind_of(model.base_model), IMPLEMENTATION)
    got = capture(kind_of(model))
    assert Counter(f[0] for f in _forms(got)) == Counter(f[0] for f in _forms(wanted))
    ids, positions = token_ids(), torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(got.graph_module(ids, positions), wanted.graph_module(ids, positions))


def test_graphs_are_equal_node_by_node() -> None:
    model = tiny("llama", num_hidden_layers=3)
    wanted = _forms(_export(kind_of(model.base_model), IMPLEMENTATION))
    assert [f[0] for f in _forms(capture(kind_of(model)))] == [f[0] for f in wanted]


@pytest.mark.parametrize(
    ("family", "kinds"), [("llama", [0]), ("gpt2", [0]), ("gemma3_text", [0, 1]), ("qwen3_moe", [0, 1])]
)
def test_one_layer_of_each_kind_is_exported(family: str, kinds: list[int]) -> None:
    assert _exported(tiny(family, **DEEP[family])) == kinds


def test_layers_with_other_settings_or_hooks_are_exported_separately() -> None:
    model = tiny("llama", num_hidden_layers=4)
    model.model.layers[1].self_attn.scaling *= 2
    model.model.layers[3].mlp.register_forward_hook(lambda module, args, out: out * 2)
    assert _exported(model) == [0, 1, 3]
    ids = token_ids()
    with torch.no_grad():
        wanted = model.base_model(input_ids=ids).last_hidden_state
        got = capture(kind_of(model)).graph_module(ids, torch.arange(12)[None])
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_layers_with_shared_weights_are_exported_separately() -> None:
    model = tiny("llama", num_hidden_layers=3)
    model.model.layers[2].mlp = model.model.layers[0].mlp
    ids = token_ids()
    with torch.no_grad():
        wanted = model.base_model(input_ids=ids).last_hidden_state
        got = capture(kind_of(model)).graph_module(ids, torch.arange(12)[None])
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_layers_that_compute_with_layer_idx_are_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp = transformers.models.llama.modeling_llama.LlamaMLP
    plain = mlp.forward

    def by_number(self: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = plain(self, x)
        return out * (self.layer_idx + 1)

    model = tiny("llama", num_hidden_layers=3)
    for number, layer in enumerate(model.model.layers):
        layer.mlp.layer_idx = number
    monkeypatch.setattr(mlp, "forward", by_number)
    with pytest.raises(LayersDiffer, match="own number"):
        _exported(model)
    ids = token_ids()
    with torch.no_grad():
        wanted = model.base_model(input_ids=ids).last_hidden_state
        got = capture(kind_of(model)).graph_module(ids, torch.arange(12)[None])
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
