"""Models whose linear layers are rotated: plans, saved folders, restored weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import torch_armllm
from tests.support.models import tiny, token_ids
from tests.support.packed_weights import error
from torch_armllm import Recipe
from torch_armllm.quant.modules.experts import QuantExperts
from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.quant.modules.tied_embedding import TiedEmbedding

CALIBRATION = token_ids(4, 24)


def calibrated(family: str = "llama", dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """Returns a tiny model quantized by `gptq`; its first norm makes two channels loud."""
    tied = {"tie_word_embeddings": True} if dtype == torch.bfloat16 else {}
    model = tiny(family, dtype, **tied)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.normal_(1, 0.3, generator=generator)
        if "input_layernorm" in name:
            parameter.data[3] = 60.0
    torch_armllm.quantize(model, Recipe(method="gptq", **settings), progress=False, calibration=CALIBRATION)
    return model


def rotated_layers(model: Any) -> set[str]:
    return {name for name, module in model.named_modules() if is_packed(module) and module.rotated}


def is_packed(module: Any) -> bool:
    return isinstance(module, (QuantLinear, QuantExperts))


@torch.no_grad()
def logits(model: Any, tokens: int = 13) -> Tensor:
    result: Tensor = model(token_ids(1, tokens)).logits
    return result


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "mixtral"])
def test_plans_compute_what_the_modules_do(family: str) -> None:
    model = calibrated(family)
    layers = rotated_layers(model)
    assert "lm_head" in layers and any("o_proj" in name for name in layers)
    expected = [logits(model, tokens) for tokens in (1, 13)]
    report = torch_armllm.patch(model, None, progress=False)
    assert report.captured, report.capture_reason
    for tokens, one in zip((1, 13), expected, strict=True):
        assert error(logits(model, tokens), one) < 1e-4


def test_loud_channels_cost_less() -> None:
    float_model = tiny("llama")
    plain, rotated = (calibrated(rotate=rotate) for rotate in (False, True))
    assert not rotated_layers(plain)
    first = "model.layers.0.self_attn.q_proj"
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    x[:, 3] *= 60
    errors = []
    for model in (plain, rotated):
        layer = model.get_submodule(first)
        errors.append(error(layer(x), x @ layer.dequantize().t()))
    assert errors[1] < errors[0] / 3
    for model in (plain, rotated):
        for name, module in model.named_modules():
            if isinstance(module, QuantLinear) and name.endswith("o_proj"):
                assert error(module.dequantize(), float_model.get_submodule(name).weight.detach()) < 0.2, name


@pytest.mark.parametrize("method", ["mse", "rtn", "awq", "gptq"])
def test_all_methods_rotate_int8_layers(method: str) -> None:
    for rotate in (True, False):
        model = tiny("mixtral")
        recipe = Recipe("int8", method=method, rotate=rotate, importance=False)
        calibration = CALIBRATION if method in ("awq", "gptq") else None
        torch_armllm.quantize(model, recipe, progress=False, calibration=calibration)
        layers = {name for name, module in model.named_modules() if is_packed(module)}
        assert rotated_layers(model) == (layers if rotate else set())
        assert "lm_head" in layers and any("experts" in name for name in layers)


@pytest.mark.parametrize("method", ["mse", "rtn", "awq"])
def test_only_gptq_rotates_int4_layers(method: str) -> None:
    model = tiny("llama")
    calibration = CALIBRATION if method == "awq" else None
    torch_armllm.quantize(model, Recipe(method=method), progress=False, calibration=calibration)
    assert rotated_layers(model) == {"lm_head"}


@torch.no_grad()
def test_loud_channels_cost_experts_less() -> None:
    x = torch.randn(24, 64, generator=torch.Generator().manual_seed(1))
    x[:, 3] *= 60
    ids = torch.arange(48).reshape(24, 2) % 4
    weights = torch.full((24, 2), 0.5)
    name = "model.layers.0.mlp.experts"
    expected = tiny("mixtral").get_submodule(name)(x, ids, weights)
    losses = []
    for rotate in (False, True):
        model = tiny("mixtral")
        torch_armllm.quantize(model, Recipe("int8", importance=False, rotate=rotate), progress=False)
        losses.append(error(model.get_submodule(name)(x, ids, weights), expected))
    assert losses[1] < 0.7 * losses[0], losses


@pytest.mark.parametrize("importance", [True, False])
def test_int8_models_lose_less(importance: bool) -> None:
    losses = []
    for rotate in (False, True):
        model = tiny("llama")
        for module in model.modules():
            if "RMSNorm" in type(module).__name__:
                module.weight.data[3] = 60.0
        expected = logits(model)
        recipe = Recipe("int8", importance=importance, rotate=rotate)
        torch_armllm.patch(model, recipe, progress=False)
        losses.append(error(logits(model), expected))
    assert losses[1] < 0.7 * losses[0], losses


def test_tied_embeddings_are_rotated_back(tmp_path: Path) -> None:
    model = calibrated(dtype=torch.bfloat16)
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, TiedEmbedding) and embedding.rotated
    weight = tiny("llama", torch.bfloat16, tie_word_embeddings=True).get_input_embeddings().weight.detach()
    assert error(embedding.dequantize(), weight) < 2e-3
    expected = logits(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.get_input_embeddings().dequantize(), embedding.dequantize())
    torch_armllm.patch(model, None, progress=False)
    assert error(logits(model), expected) < 3e-2


def test_four_bit_heads_are_not_rotated() -> None:
    assert "lm_head" not in rotated_layers(calibrated(head="int4"))


def test_saved_models_stay_rotated(tmp_path: Path) -> None:
    model = calibrated(rotate=True)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert rotated_layers(loaded) == rotated_layers(model) and "rotated" in repr(loaded)
    assert loaded.config.quantization_config.recipe.rotate
    torch_armllm.patch(model, None, progress=False)
    assert torch.equal(logits(loaded), logits(model))
    model.config.quantization_config.modules["model.layers.0.mlp.up_proj"]["ordered"] = True
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="up_proj is rotated, which layers with blocks, an order"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("rotated", [1, "false", None])
def test_other_saved_flags_are_refused(rotated: Any, tmp_path: Path) -> None:
    model = calibrated()
    model.config.quantization_config.modules["lm_head"]["rotated"] = rotated
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="lm_head has rotated="):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_are_rotated_too(family: str, tmp_path: Path) -> None:
    floats = {name: module for name, module in tiny(family).named_modules() if name.endswith("experts")}
    model = calibrated(family)
    experts = {name: module for name, module in model.named_modules() if isinstance(module, QuantExperts)}
    assert experts.keys() == floats.keys() <= rotated_layers(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert rotated_layers(loaded) == rotated_layers(model)
    torch_armllm.patch(model, None, progress=False)
    assert torch.equal(logits(loaded), logits(model))
    for name, module in experts.items():
        layout = module.layout
        assert layout is not None
        expected = layout.outer(floats[name].down_proj.detach())
        for got, matrix in zip(module.dequantize()[1], expected, strict=True):
            assert error(got, matrix) < 0.2


def test_experts_of_odd_sizes_are_not_rotated(tmp_path: Path) -> None:
    model = tiny("mixtral", intermediate_size=72)
    torch_armllm.quantize(model, Recipe(method="gptq"), progress=False, calibration=CALIBRATION)
    layers = rotated_layers(model)
    assert layers and not any("experts" in name for name in layers)
    modules = model.config.quantization_config.modules
    name = next(name for name in modules if name.endswith("experts"))
    modules[name]["rotated"] = True
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is rotated, which experts of 64 and 72 features cannot be"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_layers_of_odd_sizes_are_not_rotated() -> None:
    model = tiny("llama", intermediate_size=72)
    torch_armllm.quantize(model, Recipe(method="gptq"), progress=False, calibration=CALIBRATION)
    layers = rotated_layers(model)
    assert layers and not any("down_proj" in name for name in layers)


def test_only_true_and_false_are_settings() -> None:
    with pytest.raises(ValueError, match="rotate must be true or false, not 1"):
        Recipe(rotate=1)  # type: ignore[arg-type]
