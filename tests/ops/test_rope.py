"""The rotary embedding against its reference, on every variant."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_armllm.ops import rope, variants

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


def test_sizes_of_heads_are_checked() -> None:
    q, k = torch.randn(3, 2, 6), torch.randn(3, 1, 6)
    with pytest.raises(RuntimeError, match="angles for 8 dimensions, but the head size is 6"):
        rope.rope_(q, k, *angle_table(3, 4))
    with pytest.raises(RuntimeError, match="unzip can rotate at most 512 dimensions of a head, not 514"):
        rope.rope_(torch.ones(3, 1, 514), torch.ones(3, 1, 514), *torch.ones(2, 3, 257), True, True)
