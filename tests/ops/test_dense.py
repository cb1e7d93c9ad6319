"""The unquantized linear layer against its reference, on every variant."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_armllm.ops import linear, variants

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
RUNNABLE = variants.machine().distinct("dense")
BFMMLA = tuple(name for name in RUNNABLE if variants.machine().tables[name]["dense"] == "i8mm")
"""Variants that multiply bfloat16 by bfloat16 with the BFMMLA instruction, which rounds differently."""


def run_all_variants(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[Tensor]:
    """Returns the output of every variant."""
    results = []
    for name in RUNNABLE:
        with variants.use(name):
            results.append(linear.dense_linear(x, weight, bias))
    return results


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 9),
    outputs=st.sampled_from((1, 3, 8, 16, 17, 35)),
    inputs=st.sampled_from((1, 15, 16, 100, 511, 512, 530)),
    dtype=st.sampled_from(FLOATS),
    weight_dtype=st.sampled_from(FLOATS),
    with_bias=st.booleans(),
)
def test_dense_linear_matches_reference(
    tokens: int, outputs: int, inputs: int, dtype: torch.dtype, weight_dtype: torch.dtype, with_bias: bool
) -> None:
    torch.manual_seed(tokens + inputs)
    x = torch.randn(tokens, inputs).to(dtype)
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(weight_dtype)
    bias = torch.randn(outputs).to(weight_dtype) if with_bias else None
    results = run_all_variants(x, weight, bias)
    tolerance = TOLERANCE[dtype]
    expected = linear.reference_dense_linear(x, weight, bias)
    rounds_differently = BFMMLA if dtype == weight_dtype == torch.bfloat16 else ()
    for name, result in zip(RUNNABLE, results, strict=True):
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
        assert name in rounds_differently or torch.equal(result, results[RUNNABLE.index("scalar")])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("tokens", [1, 5])
def test_wide_output_is_float32(dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, 70).to(dtype), torch.randn(21, 70).to(dtype)
    for name in RUNNABLE:
        with variants.use(name):
            output = linear.dense_linear(x, weight, wide=True)
            if dtype != torch.bfloat16 or name not in BFMMLA:
                assert torch.equal(output, linear.dense_linear(x.float(), weight))
            assert torch.equal(output.to(dtype), linear.dense_linear(x, weight))


@pytest.mark.parametrize("dtype", FLOATS)
def test_result_is_independent_of_outputs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(11, 301).to(dtype), torch.randn(37, 301).to(dtype)
    for name in RUNNABLE:
        with variants.use(name):
            whole = linear.dense_linear(x, weight)
            assert torch.equal(linear.dense_linear(x, weight[5:23]), whole[:, 5:23])


@pytest.mark.parametrize("dtype", FLOATS)
def test_non_finite_values_affect_their_row_only(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(7, 45).to(dtype), (torch.rand(5, 45) + 0.1).to(dtype)
    x[2, 39], x[5, 0] = float("nan"), float("inf")
    for output in run_all_variants(x, weight):
        assert output[2].isnan().all()
        assert (output[5] == float("inf")).all()
        assert output[[0, 1, 3, 4, 6]].isfinite().all()


def test_invalid_arguments_raise() -> None:
    x = torch.randn(3, 20)
    with pytest.raises(RuntimeError, match=r"weight must have shape \(out_features, 20\)"):
        linear.dense_linear(x, torch.randn(5, 21))
    with pytest.raises(RuntimeError, match=r"bias must have shape \(5,\); it has 4 values"):
        linear.dense_linear(x, torch.randn(5, 20), torch.randn(4))
    with pytest.raises(RuntimeError, match="weight must be float32, bfloat16 or float16"):
        linear.dense_linear(x, torch.ones(5, 20, dtype=torch.int8))
