"""Per-head linear layers against their references, on every variant."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_armllm.ops import linear, variants

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
RUNNABLE = variants.machine().runnable


def packed_heads(heads: int, rows: int, columns: int) -> Tensor:
    q = torch.randint(-127, 128, (heads, rows, columns), dtype=torch.int8)
    return linear.pack_int8(q, torch.rand(heads, rows) + 0.5)


def strided_input(tokens: int, heads: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns strided inputs: a slice of wider heads."""
    return torch.randn(tokens, heads, columns + 5).to(dtype)[..., 3 : columns + 3]


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.sampled_from((0, 1, 2, 7, 8, 9, 17, 33)),
    heads=st.integers(1, 5),
    rows=st.sampled_from((1, 8, 16, 33, 96)),
    columns=st.sampled_from((1, 16, 33, 128)),
    dtype=st.sampled_from(FLOATS),
)
def test_int8_heads_match_reference_bitwise(
    tokens: int, heads: int, rows: int, columns: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(tokens + rows)
    x, weight = strided_input(tokens, heads, columns, dtype), packed_heads(heads, rows, columns)
    expected = linear.reference_int8_heads_linear(x, weight, rows)
    for name in RUNNABLE:
        with variants.use(name):
            output = linear.int8_heads_linear(x, weight, rows)
        assert torch.equal(output, expected), name
        assert output.is_contiguous()


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(0, 9),
    heads=st.integers(1, 4),
    rows=st.sampled_from((1, 16, 35)),
    columns=st.sampled_from((1, 15, 100)),
    dtype=st.sampled_from(FLOATS),
    weight_dtype=st.sampled_from(FLOATS),
)
def test_dense_heads_match_reference(
    tokens: int, heads: int, rows: int, columns: int, dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    torch.manual_seed(tokens + rows)
    x = strided_input(tokens, heads, columns, dtype)
    weight = (torch.randn(heads, rows, columns) / columns**0.5).to(weight_dtype)
    expected = linear.reference_dense_heads_linear(x, weight)
    for name in RUNNABLE:
        with variants.use(name):
            output = linear.dense_heads_linear(x, weight)
        torch.testing.assert_close(output, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_result_is_independent_of_batch_and_threads() -> None:
    torch.manual_seed(0)
    x, weight, float_weight = strided_input(70, 3, 64), packed_heads(3, 48, 64), torch.randn(3, 48, 64)
    threads = torch.get_num_threads()
    for name in RUNNABLE:
        with variants.use(name):
            for heads_linear in (
                lambda rows: linear.int8_heads_linear(rows, weight, 48),
                lambda rows: linear.dense_heads_linear(rows, float_weight),
            ):
                whole = heads_linear(x)
                assert torch.equal(torch.cat([heads_linear(x[i : i + 1]) for i in range(70)]), whole)
                assert torch.equal(torch.cat([heads_linear(x[:13]), heads_linear(x[13:])]), whole)
                torch.set_num_threads(1)
                assert torch.equal(heads_linear(x), whole)
                torch.set_num_threads(threads)


def test_non_finite_values_affect_their_head_only() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, 32)
    x[1, 2, 5], x[2, 0, 0] = float("nan"), float("inf")
    for name in RUNNABLE:
        with variants.use(name):
            y = linear.int8_heads_linear(x, packed_heads(4, 20, 32), 20)
        nan_rows = y.isnan().all(-1)
        assert nan_rows.nonzero().tolist() == [[1, 2], [2, 0]]
        assert y.isfinite().all(-1).sum() == 10


def test_mismatched_arguments_raise() -> None:
    x, weight = torch.randn(3, 2, 40), packed_heads(2, 24, 40)
    with pytest.raises(RuntimeError, match=r"not \(3, 80\)"):
        linear.int8_heads_linear(x.flatten(1), weight, 24)
    with pytest.raises(RuntimeError, match="weight has 3 heads, but x has 2"):
        linear.int8_heads_linear(x, packed_heads(3, 24, 40), 24)
    with pytest.raises(RuntimeError, match="out_features = 40 needs 3"):
        linear.int8_heads_linear(x, weight, 40)
    with pytest.raises(RuntimeError, match="another shape or scheme"):
        linear.int8_heads_linear(x, packed_heads(2, 24, 72), 24)
    with pytest.raises(RuntimeError, match="needs 2 heads of 40 inputs"):
        linear.dense_heads_linear(x, torch.randn(2, 24, 41))
    with pytest.raises(RuntimeError, match="float32, bfloat16 or float16"):
        linear.dense_heads_linear(x.double(), torch.randn(2, 24, 40))
