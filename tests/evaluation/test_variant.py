"""Names of variants."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from torch_armllm.evaluation.variant import Variant, parse_variants
from torch_armllm.quant.recipe import Recipe


def test_float_variants_run_by_transformers() -> None:
    assert Variant.parse("bf16") == Variant("bf16", "bfloat16", patched=False)
    assert Variant.parse("f32") == Variant("f32", "float32", patched=False)
    assert Variant.parse("bf16-fused") == Variant("bf16-fused", "bfloat16")


@pytest.mark.parametrize(
    "text,scheme,method",
    [
        ("int4", "g32iz", None),
        ("int4-g32iz", "g32iz", None),
        ("g128zb", "g128zb", None),
        ("int4-row+rtn", "row", "rtn"),
        ("int8", "int8", None),
    ],
)
def test_integer_variants(text: str, scheme: str, method: str | None) -> None:
    assert Variant.parse(text) == Variant(text, quantization=scheme, method=method)


@pytest.mark.parametrize(
    "text,bits,method",
    [
        ("4.5", 4.5, None),
        ("int4-5", 5.0, None),
        ("4.25+gptq", 4.25, "gptq"),
        ("int4+0.1", "+0.1", None),
        ("0.9GB+gptq", "0.9GB", "gptq"),
        ("int4-g32iz+0.25+gptq", "+0.25", "gptq"),
    ],
)
def test_mixed_variants(text: str, bits: float | str, method: str | None) -> None:
    variant = Variant.parse(text)
    assert variant == Variant(text, quantization="g32iz", method=method, bits=bits)
    assert variant.calibrated


@pytest.mark.parametrize(
    "text,layers",
    [
        ("int4+a16", ("*",)),
        ("g32i+a16=head", ("head",)),
        ("int4+0.1+gptq+a16=head+a16=*.down_proj", ("head", "*.down_proj")),
    ],
)
def test_layers_of_int16_activations(text: str, layers: tuple[str, ...]) -> None:
    variant = Variant.parse(text)
    assert variant.int16_activations == layers
    assert variant.recipe is not None and variant.recipe.int16_activations == layers


def test_recipes_of_variants() -> None:
    assert Variant.parse("bf16").recipe is None
    assert Variant.parse("int4").recipe == Recipe()
    assert Variant.parse("int4+0.1+gptq").recipe == Recipe(method="gptq", bits="+0.1")


def test_default_method_is_for_names_without_one() -> None:
    first, second, third = parse_variants("bf16,int4-g32,int4-g32+mse", "rtn")
    assert (first.method, second.method, third.method) == (None, "rtn", "mse")


@pytest.mark.parametrize(
    "text",
    [
        "int4-g33",
        "bf17",
        "int4-g32+",
        "int4-",
        "int4-g32+magic",
        "int4+a16=",
        "int4+a16+gptq",
        "int4-g64+0.1",
        "4.5+gptq+mse",
        "4..5",
    ],
)
def test_unknown_variants_are_named(text: str) -> None:
    with pytest.raises(ValueError, match=text.replace("+", r"\+")):
        parse_variants(f"bf16,{text}")


@pytest.mark.parametrize("text", ["", ",", "bf16,bf16"])
def test_variants_must_be_distinct(text: str) -> None:
    with pytest.raises(ValueError, match="--quantization"):
        parse_variants(text)


def test_caches_of_variants(tmp_path: Path) -> None:
    for text in ("bf16-fused", "int4+a16=head", "4.5+gptq", "saved"):
        plain, cached = Variant.parse(text), Variant.parse(f"{text}+kv=int4")
        assert cached == replace(plain, name=f"{text}+kv=int4", kv_cache_dtype="int4")
        assert cached.saved == plain.saved
    assert Variant.parse(f"mine={tmp_path}+kv=int8") == Variant(
        "mine+kv=int8", folder=tmp_path, kv_cache_dtype="int8"
    )
    with pytest.raises(ValueError, match=r"write bf16-fused\+kv=int8"):
        Variant.parse("bf16+kv=int8")


def test_folders_have_names(tmp_path: Path) -> None:
    variant = Variant.parse(f"mine={tmp_path}")
    assert variant == Variant("mine", folder=tmp_path) and variant.saved and not variant.calibrated
    wide = tmp_path / "int4+a16=head"
    wide.mkdir()
    assert Variant.parse(f"mine={wide}") == Variant("mine", folder=wide)
    with pytest.raises(ValueError, match="NAME=FOLDER"):
        Variant.parse("mine=nowhere")
    with pytest.raises(ValueError, match="NAME=FOLDER"):
        Variant.parse(f"={tmp_path}")
