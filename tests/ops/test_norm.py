"""The norms against their references, on every variant."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_armllm.ops import norm, variants

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
RUNNABLE = variants.machine().distinct("norm")
WIDTHS = (1, 15, 16, 33, 64, 130, 576)

Op = Callable[[Tensor], Tensor]


def forms(width: int, dtype: torch.dtype = torch.float32) -> dict[str, tuple[Op, Op]]:
    """Returns every form of the two norms and its reference, as functions of x."""
    weight, bias = torch.randn(width).to(dtype), torch.randn(width).to(dtype)
    return {
        "rms": (
            lambda x: norm.rms_norm(x, weight, 1e-5),
            lambda x: norm.reference_rms_norm(x, weight, 1e-5),
        ),
        "gemma": (
            lambda x: norm.rms_norm(x, weight, 1e-6, 1.0),
            lambda x: norm.reference_rms_norm(x, weight, 1e-6, 1.0),
        ),
        "layer": (
            lambda x: norm.layer_norm(x, weight, bias, 1e-5),
            lambda x: norm.reference_layer_norm(x, weight, bias, 1e-5),
        ),
        "layer without bias": (
            lambda x: norm.layer_norm(x, weight, None, 1e-5),
            lambda x: norm.reference_layer_norm(x, weight, None, 1e-5),
        ),
        "layer without weight and bias": (
            lambda x: norm.layer_norm(x, None, None, 1e-5),
            lambda x: norm.reference_layer_norm(x, None, None, 1e-5),
        ),
    }


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", WIDTHS)
def test_matches_reference(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x = (torch.randn(5, width) * 3 + 1).to(dtype)
    for weight_dtype in (dtype, torch.float32):
        for op, reference in forms(width, weight_dtype).values():
            for name in RUNNABLE:
                with variants.use(name):
                    assert_close(op(x), reference(x))


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(0, 5),
    width=st.integers(1, 200),
    dtype=st.sampled_from(FLOATS),
    scale=st.sampled_from((1e-3, 1.0, 100.0)),
)
def test_add_norm_equals_norm_of_the_rounded_sum(
    rows: int, width: int, dtype: torch.dtype, scale: float
) -> None:
    torch.manual_seed(rows + width)
    x, residual = ((torch.randn(rows, width) * scale).to(dtype) for _ in range(2))
    weight, bias = torch.randn(2, width)
    for name in RUNNABLE:
        with variants.use(name):
            out, total = norm.add_rms_norm(x, residual, weight, 1e-5, 1.0)
            assert torch.equal(total, x + residual)
            assert torch.equal(out, norm.rms_norm(total, weight, 1e-5, 1.0))
            out, total = norm.add_layer_norm(x, residual, weight, bias, 1e-5)
            assert torch.equal(total, x + residual)
            assert torch.equal(out, norm.layer_norm(total, weight, bias, 1e-5))


def test_non_finite_values_affect_their_row_only() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 70)
    x[1, 69] = float("nan")
    x[2, 3] = float("inf")
    for op, reference in forms(70).values():
        for name in RUNNABLE:
            with variants.use(name):
                assert_close(op(x), reference(x))


def test_invalid_arguments_raise() -> None:
    x = torch.randn(2, 8)
    with pytest.raises(RuntimeError, match=r"weight must have shape \(8,\)"):
        norm.rms_norm(x, torch.ones(7), 1e-5)
    with pytest.raises(RuntimeError, match="residual must have the shape and the dtype of x"):
        norm.add_rms_norm(x, x.bfloat16(), torch.ones(8), 1e-5)
    with pytest.raises(RuntimeError, match="weight and bias must have the same dtype"):
        norm.layer_norm(x, torch.ones(8), torch.ones(8).half(), 1e-5)
    with pytest.raises(RuntimeError, match="x must be float32, bfloat16 or float16"):
        norm.rms_norm(x.long(), torch.ones(8), 1e-5)
