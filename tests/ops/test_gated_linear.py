"""Gated linear layers against the reference, on every kernel variant and batch size."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.packed_weights import error, packed, same_bits
from torch_armllm.ops import linear, variants

VARIANTS = variants.machine().distinct("linear", "activation")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Runs on one thread: a thread team is slow on a busy machine, and thread counts have their own test."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("scheme", linear.EXACT)
@pytest.mark.parametrize(
    "activation", ["silu", "gelu", "gelu_tanh", "relu", "swiglu_clamped", "silu_softcapped"]
)
def test_gated_linear_matches_reference(scheme: str, activation: str) -> None:
    torch.manual_seed(0)
    rows, columns = 70, 100
    interleaved = linear.interleave_panels(packed(rows, columns, scheme), packed(rows, columns, scheme))
    gate_bias, up_bias = torch.randn(rows), torch.randn(rows)
    for tokens in (0, 1, 8, 30):
        for dtype in DTYPES:
            x = torch.randn(tokens, columns).to(dtype)
            options = (x, interleaved, rows, scheme, activation, gate_bias, up_bias)
            expected = linear.reference_int4_gated_linear(*options)
            results = []
            for variant in VARIANTS:
                with variants.use(variant):
                    results.append(linear.int4_gated_linear(*options))
            assert all(same_bits(r, results[0]) for r in results)
            tolerance = 2e-6 if dtype == torch.float32 else 4e-3
            assert results[0].shape == (tokens, rows)
            assert error(results[0], expected) < tolerance


def test_gated_linear_without_biases_is_independent_of_batch() -> None:
    torch.manual_seed(0)
    interleaved = linear.interleave_panels(packed(300, 64, "g32i"), packed(300, 64, "g32i"))
    x = torch.randn(40, 64)
    for variant in VARIANTS:
        with variants.use(variant):
            whole = linear.int4_gated_linear(x, interleaved, 300)
            assert (
                error(whole, linear.reference_int4_gated_linear(x, interleaved, 300, "g32i", "silu")) < 2e-6
            )
            assert same_bits(linear.int4_gated_linear(x[:3], interleaved, 300), whole[:3])
            with_zero_bias = linear.int4_gated_linear(x, interleaved, 300, gate_bias=torch.zeros(300))
            assert same_bits(with_zero_bias, whole)
