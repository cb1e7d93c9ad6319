"""Layers that a recipe names have INT16 activations: patched, saved, loaded and from folder to folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import torch_armllm
from tests.checkpoint.formats import test_gguf as gguf
from tests.quant.methods.loud_model import loud
from tests.support.calibration import tensors
from tests.support.models import tiny, token_ids
from torch_armllm import Recipe
from torch_armllm.checkpoint.load import load_model
from torch_armllm.checkpoint.quantize_folder import quantize_folder
from torch_armllm.evaluation.variant import Variant
from torch_armllm.quant.inplace import quantize
from torch_armllm.quant.modules.linear import QuantLinear


def wide(model: torch.nn.Module) -> set[str]:
    """Names of the layers with INT16 activations."""
    return {n for n, m in model.named_modules() if isinstance(m, QuantLinear) and m.digits == 2}


def linear(model: torch.nn.Module) -> set[str]:
    """Names of the packed linear layers."""
    return {n for n, m in model.named_modules() if isinstance(m, QuantLinear)}


@torch.no_grad()
def test_they_bring_the_outputs_near_those_of_float_activations() -> None:
    tokens = token_ids(2, 24)
    errors = []
    for patterns in ((), ("*",)):
        model = loud("llama")
        torch_armllm.patch(model, Recipe(int16_activations=patterns), progress=False)
        assert wide(model) == (linear(model) if patterns else set())
        actual = model(tokens).logits
        torch_armllm.unpatch(model)  # the weights stay rounded
        errors.append(float((actual - model(tokens).logits).norm()))
    assert errors[1] < 0.05 * errors[0]


@pytest.mark.parametrize("method", ["mse", "gptq"])
def test_patterns_and_kinds_choose_the_layers(method: str) -> None:
    model = tiny("llama")
    recipe = Recipe(method=method, int16_activations=["*.1.mlp.down_proj", "head"])
    quantize(model, recipe, progress=False, calibration=token_ids(2, 16) if method == "gptq" else None)
    assert wide(model) == {"model.layers.1.mlp.down_proj", "lm_head"}


def test_experts_keep_int8_activations() -> None:
    model = tiny("qwen3_moe")
    quantize(model, Recipe(int16_activations=["attention"]), progress=False)
    assert wide(model) == {n for n in linear(model) if "self_attn" in n}
    with pytest.raises(ValueError, match=r"int16_activations: 'experts' fits no quantized linear layer"):
        quantize(tiny("qwen3_moe"), Recipe(int16_activations=["experts"]), progress=False)


def test_a_pattern_that_fits_nothing_changes_nothing() -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match=r"'\*\.dwon_proj' fits no quantized linear layer of the model"):
        quantize(model, Recipe(int16_activations=["*.dwon_proj"]), progress=False)
    assert not linear(model)


@pytest.mark.parametrize("bad", ["*", [1], 2, None])
def test_other_types_are_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="int16_activations must be a list of patterns"):
        Recipe(int16_activations=bad)


@torch.no_grad()
def test_saved_models_and_folders_keep_them(tmp_path: Path) -> None:
    model, tokens = loud("llama"), token_ids(2, 12)
    model.save_pretrained(tmp_path / "float")
    recipe = Recipe(int16_activations=["*.down_proj"])
    torch_armllm.patch(model, recipe, progress=False)
    model.save_pretrained(tmp_path / "saved")
    quantize_folder(tmp_path / "float", tmp_path / "streamed", recipe, progress=False)
    for name in ("saved", "streamed"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert wide(loaded) == {n for n in linear(loaded) if n.endswith("down_proj")}
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
        settings = json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
        assert settings["int16_activations"] == ["*.down_proj"]
    assert tensors(tmp_path / "saved").keys() == tensors(tmp_path / "streamed").keys()


def test_a_saved_model_keeps_its_own(tmp_path: Path) -> None:
    model = tiny("llama")
    torch_armllm.patch(model, progress=False)
    model.save_pretrained(tmp_path)
    loaded = torch_armllm.load(str(tmp_path), fuse=False)
    with pytest.raises(ValueError, match="quantized already, with INT16 activations in 0 patterns"):
        torch_armllm.patch(loaded, Recipe(int16_activations=["head"]), progress=False)


def test_models_of_the_former_default_stay_as_they_are(tmp_path: Path) -> None:
    model = tiny("llama")
    torch_armllm.patch(model, "g32i", progress=False)
    model.save_pretrained(tmp_path)
    loaded = torch_armllm.load(str(tmp_path), fuse=False)
    torch_armllm.patch(loaded, progress=False)
    assert loaded.model.layers[0].mlp.down_proj.scheme == "g32i"


@torch.no_grad()
def test_files_of_other_tools_take_them(tmp_path: Path) -> None:
    expected = gguf.write(tmp_path / "tiny.gguf", "Q4_1")
    ids = token_ids(1, 4) % gguf.VOCABULARY  # more tokens fold the scales of groups, which rounds, too
    errors = []
    for patterns in ((), ("*",)):
        recipe = Recipe(head=None, int16_activations=patterns)
        model = load_model(str(tmp_path / "tiny.gguf"), torch.float32, quantization=recipe)
        assert wide(model) == (linear(model) if patterns else set())
        errors.append(float((model(ids).logits - expected(ids).logits).norm()))
    assert errors[1] < 0.05 * errors[0]


def test_variants_of_the_comparison() -> None:
    variant = Variant.parse("int4+gptq+a16")
    assert variant == Variant(variant.name, quantization="g32iz", method="gptq", int16_activations=("*",))
    assert not Variant.parse("int4+gptq").int16_activations
