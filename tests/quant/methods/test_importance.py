"""The scale search, weighted by the layer's inputs."""

from __future__ import annotations

import pytest
import torch

from tests.support.models import tiny, token_ids
from torch_armllm import Recipe
from torch_armllm.quant.inplace import quantize
from torch_armllm.quant.layers import find_layers
from torch_armllm.quant.methods.importance import input_energies
from torch_armllm.quant.schemes import registry
from torch_armllm.quant.schemes.base import Search

SEARCHED = ["g32i", "g32iz", "int3", "g32", "row"]


@pytest.mark.parametrize("name", SEARCHED)
def test_importance_reduces_the_weighted_error(name: str) -> None:
    torch.manual_seed(0)
    weight, importance = torch.randn(32, 96), torch.rand(96) ** 6 + 1e-3
    scheme = registry.scheme_named(name)
    errors = []
    for given in (None, importance):
        found, _ = scheme.quantize(weight, Search(given))
        errors.append(float(((scheme.dequantize(found) - weight).square() * importance).sum()))
    assert errors[1] < 0.95 * errors[0]


@pytest.mark.parametrize("name", SEARCHED)
def test_equal_importance_changes_nothing(name: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(20, 70)
    scheme = registry.scheme_named(name)
    plain, _ = scheme.quantize(weight)
    weighted, _ = scheme.quantize(weight, Search(torch.ones(70)))
    assert torch.equal(plain.q, weighted.q)
    assert torch.equal(plain.scales, weighted.scales)


def test_input_energies_follow_the_inputs() -> None:
    model = tiny("mixtral")
    layers = find_layers(model)
    found = input_energies(model, layers)
    assert {"model.layers.0.self_attn.q_proj", "model.layers.1.mlp.experts"} <= set(found)
    assert "lm_head" not in found
    for energy in found.values():
        assert float(energy.mean()) == pytest.approx(1, abs=0.01)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(0)
        model.model.layers[0].input_layernorm.weight[3] *= 100
    louder = input_energies(model, layers)["model.layers.0.self_attn.q_proj"]
    assert int(louder.argmax()) == 3
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_importance_reduces_the_logit_error() -> None:
    ids = token_ids(2, 40)
    model = tiny("llama")
    with torch.no_grad():
        for layer in model.model.layers:  # as in real models, a few channels are far louder than the others
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight.mul_(torch.where(torch.arange(64) % 16 == 3, 6.0, 0.5))
        expected = model(ids).logits
    errors = []
    for importance in (False, True):
        twin = tiny("llama")
        twin.load_state_dict(model.state_dict())
        quantize(twin, Recipe(importance=importance), progress=False)
        with torch.no_grad():
            errors.append(float((twin(ids).logits - expected).norm()))
    assert errors[1] < errors[0]
