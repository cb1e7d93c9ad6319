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


def test_infinite_logits_have_valid_logprobs() -> None:
    logits = torch.full((3, 40), -math.inf)
    logits[0, 5], logits[1, 7] = 2.0, math.inf
    token_logprobs, ranks, best_ids, best_logprobs = top_logprobs(logits, torch.tensor([5, 7, 3]), 2)
    assert token_logprobs.tolist() == [0, 0, -math.inf] and ranks.tolist() == [1, 1, 1]
    assert best_ids.tolist() == [[5, 0], [7, 0], [0, 1]]
    assert best_logprobs[:2, 0].tolist() == [0, 0] and best_logprobs[:, 1].tolist() == [-math.inf] * 3
