"""Sampling probabilities and log-probabilities against plain torch, on every variant."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_armllm.ops import variants
from torch_armllm.ops.sample import (
    reference_probabilities,
    reference_top_logprobs,
    sample_probabilities,
    top_logprobs,
)
from torch_armllm.ops.sample.reference import penalized

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
RUNNABLE = variants.machine().runnable


def probabilities(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, **more: Any
) -> Tensor:
    """Calls `sample_probabilities` with the same settings in every row."""
    rows = logits.shape[0]
    return sample_probabilities(
        logits,
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        **more,
    )


@settings(max_examples=40, deadline=None)
@given(
    vocabulary=st.sampled_from((1, 2, 63, 65, 700, 9000)),
    dtype=st.sampled_from(FLOATS),
    temperature=st.sampled_from((0.0, 0.3, 1.0, 2.5)),
    top_k=st.sampled_from((-1, 0, 1, 2, 40, 600, 100_000)),
    top_p=st.sampled_from((0.0, 0.1, 0.9, 0.999, 1.0)),
    min_p=st.sampled_from((0.0, 0.02, 1.0)),
    spread=st.sampled_from((0.0, 0.5, 4.0)),
)
def test_probabilities_match_reference(
    vocabulary: int,
    dtype: torch.dtype,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    spread: float,
) -> None:
    torch.manual_seed(vocabulary)
    logits = (torch.randn(2, vocabulary) * spread).to(dtype)
    actual = []
    for name in RUNNABLE:
        with variants.use(name):
            actual.append(probabilities(logits, temperature, top_k, top_p, min_p))
    assert all(torch.equal(actual[0], other) for other in actual)
    for row in range(2):
        expected = reference_probabilities(logits[row], temperature, top_k, top_p, min_p)
        # Rounding may move the least probable token across the top-p threshold.
        smallest = float(expected[expected > 0].min()) if 0 < top_p < 1 else 0.0
        assert (actual[0][row] - expected).abs().sum() <= 2.1 * smallest + 1e-4
        assert actual[0][row].sum() == pytest.approx(1, abs=1e-4)


def test_penalties_are_applied_to_probabilities() -> None:
    torch.manual_seed(0)
    logits, prompt, output = torch.randn(1, 9000), torch.tensor([5, 8000]), torch.tensor([7, 7, 8999])
    logits[0, [5, 7, 8999]] = 6.0
    actual = probabilities(
        logits,
        *(0.8, 0, 1.0, 0.0),
        repetition_penalty=torch.tensor([1.2]),
        presence_penalty=torch.tensor([0.5]),
        frequency_penalty=torch.tensor([0.3]),
        prompt_ids=prompt,
        prompt_offsets=torch.tensor([0, 2]),
        output_ids=output,
        output_offsets=torch.tensor([0, 3]),
    )
    expected = reference_probabilities(penalized(logits[0], prompt, output, 1.2, 0.5, 0.3), 0.8, 0, 1.0, 0.0)
    torch.testing.assert_close(actual[0].double(), expected, rtol=1e-4, atol=1e-7)


@settings(max_examples=30, deadline=None)
@given(
    vocabulary=st.sampled_from((1, 15, 64, 65, 700, 20_000)),
    dtype=st.sampled_from(FLOATS),
    count=st.sampled_from((0, 1, 5, 70, 20_000)),
    spread=st.sampled_from((0.0, 2.0, 200.0)),
)
def test_top_logprobs_match_reference(vocabulary: int, dtype: torch.dtype, count: int, spread: float) -> None:
    torch.manual_seed(count)
    logits = (torch.randn(3, vocabulary) * spread).to(dtype)
    if vocabulary > 20:
        logits[1, 3] = math.nan
    ids, count = torch.randint(0, vocabulary, (3,)), min(count, vocabulary)
    expected = reference_top_logprobs(logits, ids, count)
    for name in RUNNABLE:
        with variants.use(name):
            token_logprobs, ranks, best_ids, best_logprobs = top_logprobs(logits, ids, count)
            assert torch.equal(ranks, expected[1]) and torch.equal(best_ids, expected[2])
            torch.testing.assert_close(token_logprobs, expected[0], rtol=1e-5, atol=2e-5)
            torch.testing.assert_close(best_logprobs, expected[3], rtol=1e-5, atol=2e-5)


def test_infinite_logits_have_valid_logprobs() -> None:
    logits = torch.full((3, 40), -math.inf)
    logits[0, 5], logits[1, 7] = 2.0, math.inf
    token_logprobs, ranks, best_ids, best_logprobs = top_logprobs(logits, torch.tensor([5, 7, 3]), 2)
    assert token_logprobs.tolist() == [0, 0, -math.inf] and ranks.tolist() == [1, 1, 1]
    assert best_ids.tolist() == [[5, 0], [7, 0], [0, 1]]
    assert best_logprobs[:2, 0].tolist() == [0, 0] and best_logprobs[:, 1].tolist() == [-math.inf] * 3


def test_rows_are_independent() -> None:
    torch.manual_seed(0)
    logits = (torch.randn(5, 9000) * 3).bfloat16()
    wide = torch.cat([logits, torch.full((5, 30), 9.0).bfloat16()], 1)[:, :9000]
    ids = torch.arange(5) * 11
    together = top_logprobs(wide, ids, 4)
    for row in range(5):
        single = top_logprobs(logits[row : row + 1], ids[row : row + 1], 4)
        assert all(torch.equal(a[0], b[row]) for a, b in zip(single, together, strict=True))
    settings_ = (0.7, 500, 0.9, 0.0)
    all_rows = probabilities(wide, *settings_)
    assert torch.equal(all_rows[2:3], probabilities(logits[2:3], *settings_))
    assert top_logprobs(logits[:0], ids[:0], 3)[3].shape == (0, 3)
    assert probabilities(logits[:0], *settings_).shape == (0, 9000)


def test_invalid_arguments_raise() -> None:
    logits = torch.randn(2, 30)
    with pytest.raises(RuntimeError, match="ids of row 1 is 30; the vocabulary has 30"):
        top_logprobs(logits, torch.tensor([0, 30]), 1)
    with pytest.raises(RuntimeError, match="count is 31; it must lie in 0 … 30"):
        top_logprobs(logits, torch.tensor([0, 1]), 31)
    with pytest.raises(RuntimeError, match="one value for each of the 2 rows"):
        top_logprobs(logits, torch.tensor([0]), 1)
    with pytest.raises(RuntimeError, match="logits of row 0 hold no number above -inf"):
        probabilities(torch.full((1, 30), math.nan), 1.0, 0, 1.0, 0.0)
