"""The rotary embedding against its reference, on every variant."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_armllm.ops import rope, variants

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
RUNNABLE = variants.machine().distinct("rope")


def angle_table(tokens: int, half_size: int) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines (tokens, half_size) for increasing positions."""
    inv_freq = 1.0 / 10000.0 ** (torch.arange(half_size) / max(half_size, 1))
    return rope.reference_rope_table(torch.arange(tokens) * 37 + 5, inv_freq)


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, unzip: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns rotated copies of queries and keys."""
    q, k = q.clone(), k.clone()
    rope.rope_(q, k, cos, sin, interleaved, unzip)
    return q, k


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 5),
    q_heads=st.integers(1, 5),
    k_heads=st.integers(0, 3),
    half_size=st.integers(1, 40),
    unrotated=st.sampled_from((0, 1, 16)),
    pair_options=st.sampled_from(((False, False), (True, False), (True, True))),
    dtype=st.sampled_from(FLOATS),
)
def test_matches_reference(
    tokens: int,
    q_heads: int,
    k_heads: int,
    half_size: int,
    unrotated: int,
    pair_options: tuple[bool, bool],
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(half_size)
    size = max(2 * half_size + unrotated, 1)
    q, k = torch.randn(tokens, q_heads, size).to(dtype), torch.randn(tokens, k_heads, size).to(dtype)
    cos, sin = angle_table(tokens, half_size)
    actual = []
    for name in RUNNABLE:
        with variants.use(name):
            actual.append(rotate(q, k, cos, sin, *pair_options))
    assert_close(actual[0][0], rope.reference_rope(q, cos, sin, *pair_options))
    assert_close(actual[0][1], rope.reference_rope(k, cos, sin, *pair_options))
    for other in actual[1:]:
        assert torch.equal(other[0], actual[0][0])
        assert torch.equal(other[1], actual[0][1])


def test_slices_of_a_merged_projection_are_rotated_in_place() -> None:
    torch.manual_seed(0)
    q_heads, k_heads, size, tokens = 4, 2, 24, 3
    merged = torch.randn(1, tokens, (q_heads + 2 * k_heads) * size)
    cos, sin = angle_table(tokens, size // 2)
    for name in RUNNABLE:
        with variants.use(name):
            rotated_in_place = merged.clone()
            q, k, v = rotated_in_place.split((q_heads * size, k_heads * size, k_heads * size), dim=-1)
            rope.rope_(q.unflatten(-1, (-1, size)), k.unflatten(-1, (-1, size)), cos, sin)
            original = merged.split((q_heads * size, k_heads * size, k_heads * size), dim=-1)
            expected = rope.reference_rope(original[0].unflatten(-1, (-1, size)), cos, sin).flatten(-2)
            assert_close(q, expected)
            expected = rope.reference_rope(original[1].unflatten(-1, (-1, size)), cos, sin).flatten(-2)
            assert_close(k, expected)
            assert torch.equal(v, original[2])


@pytest.mark.parametrize("tokens", [0, 1, 50])
def test_rope_table_matches_reference(tokens: int) -> None:
    positions = torch.randint(0, 100_000, (1, tokens))
    inv_freq = 1.0 / 500000.0 ** (torch.arange(33) / 33)
    for actual, expected in zip(
        rope.rope_table(positions, inv_freq, 1.25),
        rope.reference_rope_table(positions, inv_freq, 1.25),
        strict=True,
    ):
        assert actual.shape == (tokens, 33)
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, expected, rtol=2e-7, atol=1e-7)


@pytest.mark.parametrize("numbers", [1, 3])
@pytest.mark.parametrize("tokens", [0, 1, 20])
def test_tokens_may_have_several_positions(tokens: int, numbers: int) -> None:
    positions = torch.randint(0, 1000, (1, tokens, numbers))
    inv_freq, axes = torch.rand(7), torch.arange(7) % numbers
    arguments = (positions, inv_freq, 0.5, -3, axes)
    for actual, expected in zip(
        rope.rope_table(*arguments), rope.reference_rope_table(*arguments), strict=True
    ):
        assert actual.shape == (tokens, 7)
        torch.testing.assert_close(actual, expected, rtol=2e-7, atol=1e-7)


def test_invalid_arguments_raise() -> None:
    cos, sin = angle_table(3, 4)
    q, k = torch.randn(3, 2, 8), torch.randn(3, 1, 8)
    with pytest.raises(RuntimeError, match="q and k must agree in tokens"):
        rope.rope_(q, k[:2], cos, sin)
    with pytest.raises(RuntimeError, match="there are 3 tokens, but the number of rows is 2"):
        rope.rope_(q, k, cos[:2], sin)
    with pytest.raises(RuntimeError, match="angles for 8 dimensions, but the head size is 6"):
        rope.rope_(q[..., :6], k[..., :6], cos, sin)
    with pytest.raises(RuntimeError, match="unzip needs interleaved=True"):
        rope.rope_(q, k, cos, sin, False, True)
    with pytest.raises(RuntimeError, match="unzip can rotate at most 512 dimensions of a head, not 514"):
        rope.rope_(torch.ones(3, 1, 514), torch.ones(3, 1, 514), *torch.ones(2, 3, 257), True, True)
    with pytest.raises(RuntimeError, match="cos must be float32"):
        rope.rope_(q, k, cos.bfloat16(), sin)
    with pytest.raises(RuntimeError, match="positions must be int64"):
        rope.rope_table(torch.arange(3, dtype=torch.int32), torch.rand(4))
    with pytest.raises(RuntimeError, match="axes holds 2, but positions has 2 numbers"):
        rope.rope_table(torch.ones(3, 2, dtype=torch.int64), torch.rand(4), axes=torch.arange(4))
    with pytest.raises(RuntimeError, match=r"axes must be int64 of shape \(4\)"):
        rope.rope_table(torch.ones(3, 2, dtype=torch.int64), torch.rand(4), axes=torch.zeros(4))
