"""The sensitivity of layers is the divergence that rounding them causes; the model stays as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.quant.methods.loud_model import loud
from tests.support.models import tiny, token_ids
from torch_armllm.quant.layers import Layer, find_layers
from torch_armllm.quant.methods.calibrated import sensitivity
from torch_armllm.quant.methods.calibrated.layerwise import NotByLayersError, Stages
from torch_armllm.quant.methods.calibrated.sensitivity import LayerSensitivity, Sensitivity
from torch_armllm.quant.schemes.base import Search
from torch_armllm.quant.schemes.registry import scheme_named

SCHEMES = ("g32i", "int6", "int8")


def layers_of(model: nn.Module) -> list[Layer]:
    """Layers whose schemes may be chosen."""
    return [x for x in find_layers(model) if x.reason is None and x.kind in ("linear", "experts")]


def measure(model: nn.Module, tokens: Tensor) -> list[LayerSensitivity]:
    """Sensitivities of all layers."""
    measuring = Sensitivity(model, layers_of(model), SCHEMES, tokens)
    for _ in range(measuring.stages):
        measuring.run()
    return measuring.result()


@torch.no_grad()
def divergence(model: nn.Module, tokens: Tensor, expected: Tensor) -> float:
    """Mean divergence of the model's predictions from ``expected`` log probabilities."""
    actual = model(tokens).logits.float().log_softmax(-1)
    return float((expected.exp() * (expected - actual)).sum(-1).mean())


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gpt2", "mixtral"])
@torch.no_grad()
def test_a_decoder_layer_has_the_divergence_of_rounding_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sensitivity, "energy_of", lambda inputs: torch.ones(inputs[0].shape[-1]))
    model, tokens = loud(kind), token_ids(3, 40)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model(tokens).logits.float().log_softmax(-1)
    found = measure(model, tokens)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [x.layer.name for x in found] == [x.name for x in layers_of(model)]
    stage_of = Stages(model, tokens, 1).stage_indices(layers_of(model))
    for stage in sorted(set(stage_of.values())):
        inside = [x for x in found if stage_of[x.layer.name] == stage]
        for x in inside:
            _round(x.layer)
        loss = sum(x.loss["g32i"] for x in inside)
        assert loss == pytest.approx(divergence(model, tokens, expected), rel=1e-3)
        model.load_state_dict(before)


@torch.no_grad()
def _round(layer: Layer) -> None:
    scheme = scheme_named("g32i")
    for matrices in layer.matrices():
        for matrix in matrices:
            matrix.copy_(scheme.dequantize(scheme.quantize(matrix, Search())[0]))


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_more_bits_lose_less(kind: str) -> None:
    for x in measure(loud(kind), token_ids(2, 30)):
        assert 0 < x.loss["int8"] < 0.05 * x.loss["g32i"]
        assert 0 < x.loss["int6"] < 0.3 * x.loss["g32i"]


def test_a_layer_whose_rounding_changes_nothing_costs_nothing() -> None:
    model = tiny("llama")
    torch.nn.init.zeros_(model.model.layers[0].self_attn.o_proj.weight)
    for x in measure(model, token_ids(2, 30)):
        silent = x.layer.name.startswith("model.layers.0.self_attn")
        assert (x.loss["g32i"] == 0) == silent, x.layer.name


def test_layers_that_read_the_same_tensor_are_known() -> None:
    found = {x.layer.name.rpartition(".")[2]: x.inputs for x in measure(tiny("llama"), token_ids(2, 9))}
    assert found["q_proj"] == found["k_proj"] == found["v_proj"]
    assert found["gate_proj"] == found["up_proj"]
    assert len({found[name] for name in ("q_proj", "o_proj", "up_proj", "down_proj")}) == 4


def test_a_model_that_does_not_run_layer_by_layer_is_refused() -> None:
    model = tiny("llama")
    model.model.layers.append(model.model.layers[0])
    with pytest.raises(NotByLayersError, match="choose schemes with overrides instead of bits"):
        Sensitivity(model, layers_of(model), SCHEMES, token_ids(2, 9))
