"""Recipes: overrides, methods, and INT8 for all layers."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import torch_armllm
from tests.support.models import logits, tiny
from torch_armllm import LLM, ArmInt4Config
from torch_armllm.quant.inplace import quantize
from torch_armllm.quant.layers import find_layers
from torch_armllm.quant.recipe import LEFT, Recipe, kind_of
from torch_armllm.quant.report import LayerRecord
from torch_armllm.quant.schemes.base import Peak
from torch_armllm.quant.schemes.registry import SCHEMES

OVERRIDES: dict[str, str | None] = {
    "attention": "int8",
    "*.layers.0.*": "g64",
    "*.1.mlp.down_proj": None,
    "mlp": "row",
    "*.0.mlp.up_proj": "g128z",
}


def schemes(records: list[LayerRecord]) -> dict[str, str]:
    return {r.name.removeprefix("model.layers."): r.scheme if r.quantized else "-" for r in records}


def test_last_matching_override_applies_and_ignore_wins() -> None:
    found = schemes(
        quantize(tiny("llama"), Recipe(overrides=OVERRIDES, ignore=["*.1.mlp.up_proj"]), progress=False)
    )
    assert found["0.self_attn.q_proj"] == "g64"
    assert found["1.self_attn.q_proj"] == "int8"
    assert found["0.mlp.up_proj"] == "g128z"
    assert found["0.mlp.gate_proj"] == found["1.mlp.down_proj"] == "row"
    assert found["1.mlp.up_proj"] == "-"
    assert found["lm_head"] == "int8"


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", {"attention": 8, "mlp": 6, "head": 1}),
        ("gpt2", {"attention": 4, "mlp": 4, "head": 1}),
        ("qwen3_moe", {"attention": 8, "experts": 2, "head": 1, None: 2}),
    ],
)
def test_layer_kinds_are_derived_from_names(family: str, expected: dict[str | None, int]) -> None:
    kinds = [kind_of(layer) for layer in find_layers(tiny(family))]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == expected


def test_override_none_leaves_layers_unquantized_with_a_reason() -> None:
    records = quantize(tiny("mixtral"), Recipe(overrides={"experts": None, "head": None}), progress=False)
    left = {r.name: r.reason for r in records if not r.quantized and r.kind != "router"}
    assert set(left) == {"lm_head", "model.layers.0.mlp.experts", "model.layers.1.mlp.experts"}
    assert set(left.values()) == {LEFT}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overrides": {"*.q_prj": "int8"}}, r"override '\*.q_prj' fits no layer of the model"),
        ({"overrides": {"shared_experts": "int8"}}, "override 'shared_experts' fits no layer"),
        ({"overrides": {"*embed*": "int8"}}, "fits no layer"),
        ({"overrides": {"*.gate": "int8"}}, "gate cannot be quantized: it chooses experts"),
        ({"overrides": {"experts": "int9"}}, "unknown quantization scheme 'int9'"),
        ({"overrides": ["experts"]}, "overrides must be a dictionary of schemes by pattern"),
        ({"ignore": "*.q_proj"}, r"ignore must be a list of patterns, not '\*.q_proj'"),
        ({"method": "best"}, "unknown quantization method 'best'; there are mse, rtn"),
    ],
)
def test_invalid_recipe_raises_and_leaves_the_model_unchanged(options: dict[str, Any], message: str) -> None:
    model = tiny("mixtral")
    before = repr(model)
    with pytest.raises(ValueError, match=message):
        torch_armllm.patch(model, Recipe(**options), progress=False)
    assert repr(model) == before


def test_latent_expansion_is_int8_or_unquantized() -> None:
    layers = find_layers(tiny("llama"))
    latents = [type(x)(x.name, x.module, "latent") if "v_proj" in x.name else x for x in layers]
    found = Recipe(overrides={"attention": "g64"}).assign(latents)[1]
    assert (found["model.layers.0.self_attn.v_proj"].name, found["model.layers.0.self_attn.q_proj"].name) == (
        "int8",
        "g64",
    )
    with pytest.raises(ValueError, match="expands latents: its scheme must be int8 or None"):
        Recipe(overrides={"*.v_proj": "g64"}).assign(latents)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_loading_and_saving_keep_the_recipe(family: str, tmp_path: Path) -> None:
    overrides: dict[str, str | None] = {"attention": "g64", "*.layers.1.mlp.*": "int8", "*.0.*.o_proj": None}
    model = tiny(family)
    model.save_pretrained(tmp_path / "float")
    report = torch_armllm.patch(model, Recipe(overrides=overrides, method="rtn"), progress=False)
    config = ArmInt4Config(Recipe(overrides=overrides, method="rtn"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "float", quantization_config=config)
    assert schemes(loaded.hf_quantizer.report.layers) == schemes(report.layers)
    assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert torch.equal(logits(again), logits(model))
    assert again.config.quantization_config.recipe == Recipe(overrides=overrides, method="rtn")


def test_packed_weights_raise() -> None:
    model = tiny("llama")
    quantize(model, Recipe(overrides={"mlp": "int8"}), progress=False)
    with pytest.raises(ValueError, match="packed already, with the overrides {'mlp': 'int8'}"):
        torch_armllm.patch(model, Recipe(overrides={"attention": "g32"}))


@pytest.mark.parametrize("quantization", ["int4", Recipe(), Recipe("int4"), replace(Recipe(), method="rtn")])
def test_int4_accepts_weights_of_a_former_default(quantization: str | Recipe) -> None:
    model = tiny("llama")
    quantize(model, Recipe("g32i"), progress=False)
    torch_armllm.patch(model, quantization)
    assert model.config.quantization_config.recipe.scheme == "g32i"


@pytest.mark.parametrize("recipe", [Recipe("g32iz"), replace(Recipe(), scheme="g32iz")])
def test_the_name_of_the_default_refuses_weights_of_a_former_one(recipe: Recipe) -> None:
    model = tiny("llama")
    quantize(model, Recipe("g32i"), progress=False)
    for quantization in ("g32iz", recipe):
        with pytest.raises(ValueError, match="packed as 'g32i' already; to use 'g32iz', load the original"):
            torch_armllm.patch(model, quantization)
    with pytest.raises(ValueError, match="packed as 'g32i' already; to use 'g32iz', load the original"):
        LLM(model, quantization="g32iz", progress=False)


def test_int4_and_its_scheme_are_one_recipe() -> None:
    assert Recipe() == Recipe("int4") == Recipe("g32iz")
    assert repr(Recipe()) == repr(Recipe("g32iz"))
    assert json.dumps(Recipe().to_dict()) == json.dumps(Recipe("g32iz").to_dict())
    assert type(Recipe().to_dict()["scheme"]) is str
    assert ArmInt4Config(**Recipe().to_dict()).recipe == Recipe(importance=None)
    for recipe in (copy.deepcopy(Recipe()), pickle.loads(pickle.dumps(Recipe()))):
        recipe.check_packed(Recipe("g32i"))


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss", "gpt2"])
def test_int8_for_all_layers(family: str) -> None:
    model = tiny(family)
    expected = logits(model)
    report = torch_armllm.patch(model, "int8", progress=False)
    assert report.captured
    assert {layer.scheme for layer in report.quantized} == {"int8"}
    assert all((layer.error or 0) < 0.01 for layer in report.quantized)
    if family == "llama":  # the smallest difference may change a router's choice
        assert float((logits(model) - expected).norm() / expected.norm()) < 0.03
    assert logits(model).isfinite().all()


@pytest.mark.parametrize("name", SCHEMES)
def test_rtn_scales_are_derived_from_the_peaks(name: str) -> None:
    weight = torch.randn(32, 200, generator=torch.Generator().manual_seed(0))
    scheme = SCHEMES[name]
    found, error = scheme.quantize(weight, Peak())
    back = scheme.dequantize(found)
    peaks = weight.unflatten(1, (-1, 40)).abs().amax((1, 2))
    assert bool(((back - weight).abs().amax(1) <= peaks / 6).all())  # nothing is clipped
    searched = scheme.quantize(weight)[1]
    assert error == pytest.approx(searched) if name.startswith(("int8", "int6")) else error > searched


def test_llm_accepts_a_recipe() -> None:
    recipe = Recipe("g64", overrides={"attention": "int8"})
    llm = LLM(tiny("llama"), quantization=recipe, progress=False)
    assert llm.model.config.quantization_config.recipe == recipe
    with pytest.raises(ValueError, match=r"unknown setting 'overrides'.*quantization=Recipe\("):
        LLM(tiny("llama"), overrides={"attention": "int8"})


def test_modules_to_not_convert_stay_unquantized(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    config = ArmInt4Config(modules_to_not_convert=["model.layers.0", "mlp.down_proj", "lm_head"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    left = {record.name for record in model.hf_quantizer.report.layers if not record.quantized}
    layers = {layer.name for layer in find_layers(tiny("llama"))}
    assert left == {
        n for n in layers if n.startswith("model.layers.0.") or n.endswith(("down_proj", "lm_head"))
    }
    assert len(left) < len(layers)
    assert config.to_dict()["ignore"] == ["model.layers.0", "mlp.down_proj", "lm_head"]


@pytest.mark.parametrize("names", ["lm_head", [1], 3], ids=str)
def test_modules_to_not_convert_of_another_type_is_refused(names: object) -> None:
    with pytest.raises(ValueError, match="modules_to_not_convert must be a list of names of modules"):
        ArmInt4Config(modules_to_not_convert=names)  # type: ignore[arg-type]
