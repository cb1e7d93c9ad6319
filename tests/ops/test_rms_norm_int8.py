"""RMSNorm fused with INT8 quantization, and linear layers on its output, against separate ops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.packed_weights import packed
from torch_armllm.ops import linear, norm, variants

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
RUNNABLE = variants.machine().runnable


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(0, 20),
    width=st.sampled_from((1, 31, 32, 33, 96, 130, 576)),
    dtype=st.sampled_from(FLOATS),
    with_residual=st.booleans(),
    offset=st.sampled_from((0.0, 1.0)),
)
def test_equals_norm_then_quantization(
    rows: int, width: int, dtype: torch.dtype, with_residual: bool, offset: float
) -> None:
    torch.manual_seed(rows + width)
    x, other = (torch.randn(rows, width).to(dtype) for _ in range(2))
    weight, residual = torch.randn(width).to(dtype), other if with_residual else None
    results = []
    for name in RUNNABLE:
        with variants.use(name):
            q, scales, residual_sum = linear.rms_norm_int8(x, weight, 1e-5, offset, residual)
            plain = norm.rms_norm(x if residual is None else x + residual, weight, 1e-5, offset)
            expected, expected_scales = linear.quantize_activations(plain)
            assert torch.equal(q[:, :width], expected) and not q[:, width:].any()
            assert torch.equal(scales, expected_scales[:, 0])
            assert (
                torch.equal(residual_sum, x + residual) if residual is not None else residual_sum.numel() == 0
            )
            results.append((q, scales))
    reference, reference_scales, _ = linear.reference_rms_norm_int8(x, weight, 1e-5, offset, residual)
    assert reference.shape == results[0][0].shape
    torch.testing.assert_close(results[0][1], reference_scales, rtol=1e-2, atol=1e-6)
    assert all(torch.equal(a, b) for other in results for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("scheme", ["g32i", "g32iz", "row", "i8"])
@pytest.mark.parametrize("tokens", [0, 1, 3, 8, 9, 17, 70])
def test_linear_layers_accept_quantized_rows(tokens: int, scheme: str) -> None:
    torch.manual_seed(tokens)
    outputs, width = 40, 100
    x, weight = torch.randn(1, tokens, width).bfloat16(), torch.rand(width).bfloat16()
    panels = packed(outputs, width, scheme)
    interleaved = linear.interleave_panels(panels, panels.flip(0))
    bias, residual = torch.randn(outputs), torch.randn(1, tokens, outputs).bfloat16()
    for name in RUNNABLE:
        with variants.use(name):
            plain = norm.rms_norm(x, weight, 1e-5)
            q, scales, _ = linear.rms_norm_int8(x, weight, 1e-5)
            if scheme == "i8":
                expected = linear.int8_linear(plain, panels, outputs, bias, residual)
            else:
                expected = linear.int4_linear(plain, panels, outputs, scheme, bias, residual)
            output = linear.int4_linear_q(q, scales, panels, outputs, scheme, torch.bfloat16, bias, residual)
            assert torch.equal(output, expected) and output.dtype == expected.dtype
            gated = linear.int4_gated_linear(plain, interleaved, outputs, scheme, "silu")
            assert torch.equal(linear.int4_gated_linear_q(q, scales, interleaved, outputs, scheme), gated)
            assert (
                linear.int4_linear_q(q, scales, panels, outputs, scheme, torch.float32).dtype == torch.float32
            )


def test_non_finite_rows_have_nan_scales() -> None:
    x = torch.randn(4, 64)
    x[1, 3], x[2, 5], x[3] = math.nan, math.inf, 0.0
    for name in RUNNABLE:
        with variants.use(name):
            q, scales, _ = linear.rms_norm_int8(x, torch.ones(64), 1e-6)
            assert scales[0] > 0 and scales[1:3].isnan().all() and scales[3] == 0
            assert not q[1:].any()
