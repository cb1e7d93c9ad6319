"""`best_tokens`, the index of each row's largest logit, on every variant."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_armllm.ops import variants
from torch_armllm.ops.sample import best_tokens, reference_best_tokens, sample

RUNNABLE = variants.machine().runnable


@settings(max_examples=30, deadline=None)
@given(
    rows=st.sampled_from((0, 1, 3, 8)),
    vocabulary=st.sampled_from((1, 2, 63, 65, 700, 8192, 8193, 20_000)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    seed=st.integers(0, 100),
)
def test_matches_reference_and_greedy_sample(
    rows: int, vocabulary: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    wide = (torch.randn(rows, vocabulary + 5) * 2).to(dtype)  # strided; bfloat16 logits have many ties
    logits = wide[:, :vocabulary]
    logits[torch.rand(rows, vocabulary) < 0.1] = math.nan
    expected = reference_best_tokens(logits)
    zeros, ones, integer_zeros = torch.zeros(rows), torch.ones(rows), torch.zeros(rows, dtype=torch.int64)
    for name in RUNNABLE:
        with variants.use(name):
            actual = best_tokens(logits)
            assert torch.equal(actual, expected)
            if (actual >= 0).all():
                assert torch.equal(
                    actual, sample(logits, zeros, integer_zeros, ones, zeros, integer_zeros, integer_zeros)[0]
                )


def test_rows_without_a_value_above_minus_infinity_return_minus_one() -> None:
    logits = torch.full((4, 9000), -math.inf)
    logits[1] = math.nan
    logits[2, 8999] = -3e38
    logits[3, [20, 8500]] = math.inf
    assert best_tokens(logits).tolist() == [-1, -1, 8999, 20]
