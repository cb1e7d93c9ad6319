"""What schemes are called."""

from __future__ import annotations

import pytest

from torch_armllm.evaluation.variant import Scheme, parse_schemes


def test_floats_run_by_transformers() -> None:
    assert Scheme.parse("bf16") == Scheme("bf16", "bfloat16", patched=False)
    assert Scheme.parse("f32") == Scheme("f32", "float32", patched=False)
    assert Scheme.parse("bf16-fused") == Scheme("bf16-fused", "bfloat16")


@pytest.mark.parametrize(
    "text,scheme,method",
    [
        ("int4", "g32i", None),
        ("int4-g32i", "g32i", None),
        ("g128zb", "g128zb", None),
        ("int4-row+rtn", "row", "rtn"),
        ("int8", "int8", None),
    ],
)
def test_integers(text: str, scheme: str, method: str | None) -> None:
    assert Scheme.parse(text) == Scheme(text, quantization=scheme, method=method)


def test_the_common_method_is_for_schemes_that_name_none() -> None:
    first, second, third = parse_schemes("bf16,int4-g32,int4-g32+mse", "rtn")
    assert (first.method, second.method, third.method) == (None, "rtn", "mse")


@pytest.mark.parametrize("text", ["int4-g33", "bf17", "int4-g32+", "int4-", "int4-g32+magic"])
def test_unknown_ones_are_named(text: str) -> None:
    with pytest.raises(ValueError, match=text.replace("+", r"\+")):
        parse_schemes(f"bf16,{text}")


@pytest.mark.parametrize("text", ["", ",", "bf16,bf16"])
def test_there_must_be_different_ones(text: str) -> None:
    with pytest.raises(ValueError, match="--quantization"):
        parse_schemes(text)
