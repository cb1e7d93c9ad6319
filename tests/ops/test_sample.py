"""Sampling, its probabilities and log-probabilities against plain torch, on every variant."""

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
    philox_uniform,
    reference_probabilities,
    reference_sample,
    sample,
    sample_probabilities,
    top_logprobs,
)
from torch_armllm.ops.sample.reference import penalized

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
RUNNABLE = variants.machine().runnable


def of_rows(rows: int, temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[Tensor, ...]:
    """Returns the same settings for all rows."""
    return tuple(torch.full((rows,), value) for value in (temperature, top_k, top_p, min_p))


def draw(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seeds: Tensor | int = 0,
    steps: Tensor | int = 0,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """Calls `sample` with the same settings in every row."""
    rows = logits.shape[0]
    own = (torch.as_tensor(value).expand(rows) for value in (seeds, steps))
    return sample(logits, *of_rows(rows, temperature, top_k, top_p, min_p), *own, **more)


def test_philox_matches_random123_known_answer() -> None:
    """Random123's known answer for a counter and a key of zeros begins with 6627e8d5 e169c58d."""
    assert philox_uniform(0, 0) == (0x6627E8D5E169C58D >> 11) / 2**53


@settings(max_examples=40, deadline=None)
@given(
    vocabulary=st.sampled_from((1, 2, 63, 64, 65, 700, 9000)),
    dtype=st.sampled_from(FLOATS),
    temperature=st.sampled_from((0.0, 0.3, 1.0, 2.5)),
    top_k=st.sampled_from((-1, 0, 1, 2, 40, 600, 100_000)),
    top_p=st.sampled_from((0.0, 0.1, 0.9, 0.999, 1.0)),
    min_p=st.sampled_from((0.0, 0.02, 0.5, 1.0)),
    spread=st.sampled_from((0.0, 0.5, 4.0)),
)
def test_tokens_and_probabilities_match_reference(
    vocabulary: int,
    dtype: torch.dtype,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    spread: float,
) -> None:
    torch.manual_seed(vocabulary)
    logits = (torch.randn(3, vocabulary) * spread).to(dtype)
    seeds, steps = torch.tensor([1, -7, 2**40]), torch.tensor([0, 5, 2**33])
    given = of_rows(3, temperature, top_k, top_p, min_p)
    results = []
    for name in RUNNABLE:
        with variants.use(name):
            results.append((sample(logits, *given, seeds, steps)[0], sample_probabilities(logits, *given)))
    tokens, found = results[0]
    assert all(torch.equal(tokens, a) and torch.equal(found, b) for a, b in results)
    for row in range(3):
        seed, step, token = int(seeds[row]), int(steps[row]), int(tokens[row])
        expected = reference_probabilities(logits[row], temperature, top_k, top_p, min_p)
        # Rounding may move the least probable token across the top-p threshold.
        smallest = float(expected[expected > 0].min()) if 0 < top_p < 1 else 0.0
        assert (found[row] - expected).abs().sum() <= 2.1 * smallest + 1e-4
        assert found[row].sum() == pytest.approx(1, abs=1e-4)
        if temperature == 0:
            assert token == reference_sample(logits[row], temperature, top_k, top_p, min_p, seed, step)
        # It may also move the boundaries between tokens.
        cumulative, uniform = expected.cumsum(0), philox_uniform(seed, step)
        if spread > 0:
            assert cumulative[token] - expected[token] - 2e-3 <= uniform <= cumulative[token] + 2e-3


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.7}]
)
def test_draws_follow_the_distribution(filters: dict[str, Any]) -> None:
    """Chi-square test over many draws with fixed seeds; a correct sampler fails with probability 0.001."""
    torch.manual_seed(0)
    draws = 4000
    logits = torch.randn(20) * 1.5
    settings_ = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **filters}
    probabilities = reference_probabilities(logits, **settings_)
    for seeds, steps in ((torch.arange(draws), 3), (11, torch.arange(draws))):
        ids, _ = draw(logits.expand(draws, -1), **settings_, seeds=seeds, steps=steps)
        counts = torch.bincount(ids, minlength=20).double()
        allowed = probabilities > 0
        assert counts[~allowed].sum() == 0
        expected = probabilities[allowed] * draws
        statistic = float(((counts[allowed] - expected) ** 2 / expected).sum())
        dof = int(allowed.sum()) - 1
        # Wilson and Hilferty's normal approximation of the chi-square distribution
        normal = ((statistic / dof) ** (1 / 3) - (1 - 2 / (9 * dof))) / math.sqrt(2 / (9 * dof))
        assert normal < 3.1


def test_greedy_returns_first_of_equal_maxima() -> None:
    torch.manual_seed(0)
    for vocabulary in (1, 17, 8191, 8193, 20_000):
        for dtype in FLOATS:
            logits = (torch.randn(4, vocabulary) * 3).to(dtype)
            logits[1, vocabulary // 2 :] = 30
            logits[2] = -0.0
            logits[2, vocabulary // 3] = 0.0
            for name in RUNNABLE:
                with variants.use(name):
                    ids, _ = draw(logits, temperature=0.0, top_k=3, top_p=0.5)
                    assert torch.equal(ids[[0, 3]], logits[[0, 3]].float().argmax(-1))
                    assert ids[1] == vocabulary // 2 and ids[2] == 0


def test_ties_at_filter_thresholds() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    repeated = logits.expand(600, -1)
    seeds = torch.arange(600)
    for name in RUNNABLE:
        with variants.use(name):
            assert set(draw(repeated, top_k=2, seeds=seeds)[0].tolist()) == {1, 2, 3, 4}
            assert set(draw(repeated, top_k=1, seeds=seeds)[0].tolist()) == {1}
            # Token 1 has probability 0.42, and tokens 2 to 4 have 0.154 each: top-p 0.5 adds token 2.
            assert set(draw(repeated, top_p=0.5, seeds=seeds)[0].tolist()) == {1, 2}
            assert set(draw(repeated, top_p=0.0, seeds=seeds)[0].tolist()) == {1}
            assert set(draw(repeated, min_p=1.0, seeds=seeds)[0].tolist()) == {1}
            assert set(draw(repeated, min_p=0.3, seeds=seeds)[0].tolist()) == {1, 2, 3, 4}
            assert set(draw(torch.zeros(600, 5), top_k=2, seeds=seeds)[0].tolist()) == set(range(5))


def test_flat_distributions_cover_all_tokens() -> None:
    """With equal logits the filters must consider every token, and draws must reach all of them."""
    rows, vocabulary = 200, 3000
    logits = torch.zeros(rows, vocabulary)
    ids, _ = draw(logits, top_p=0.5, seeds=torch.arange(rows))
    assert ids.max() < vocabulary / 2 and ids.max() > vocabulary / 2 * 0.9
    ids, _ = draw(logits, seeds=torch.arange(rows))
    assert ids.max() > vocabulary * 0.9


@settings(max_examples=25, deadline=None)
@given(
    repetition=st.sampled_from((0.5, 1.0, 1.3)),
    presence=st.sampled_from((-0.5, 0.0, 1.5)),
    frequency=st.sampled_from((0.0, 0.7)),
    tokens=st.integers(0, 60),
)
def test_penalties_match_reference(repetition: float, presence: float, frequency: float, tokens: int) -> None:
    torch.manual_seed(tokens)
    vocabulary = 9000
    logits = torch.randn(2, vocabulary)
    prompts = [torch.randint(0, vocabulary, (n,)) for n in (tokens, 3)]
    outputs = [torch.randint(0, vocabulary, (n,)).repeat(2) for n in (2, tokens)]
    logits[0, outputs[0]] = 4.0
    expected = [
        penalized(row, p, o, repetition, presence, frequency)
        for row, p, o in zip(logits, prompts, outputs, strict=True)
    ]
    token_arguments = {}
    for name, token_lists in (("prompt", prompts), ("output", outputs)):
        token_arguments[f"{name}_ids"] = torch.cat(token_lists)
        token_arguments[f"{name}_offsets"] = torch.tensor(
            [0, token_lists[0].numel(), token_lists[0].numel() + token_lists[1].numel()]
        )
    more = {
        "repetition_penalty": torch.full((2,), repetition),
        "presence_penalty": torch.full((2,), presence),
        "frequency_penalty": torch.full((2,), frequency),
        **token_arguments,
    }
    for name in RUNNABLE:
        with variants.use(name):
            for temperature, top_k in ((0.0, 0), (1.0, 50)):
                actual, logprobs = draw(logits, temperature, top_k, seeds=5, logprobs=True, **more)
                expected_ids, _ = draw(torch.stack(expected), temperature, top_k, seeds=5)
                assert torch.equal(actual, expected_ids)
                torch.testing.assert_close(
                    logprobs, logits.log_softmax(-1).gather(1, actual[:, None])[:, 0], rtol=1e-5, atol=1e-5
                )


def test_row_result_is_independent_of_batch_and_threads() -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, 20_000).bfloat16() * 2
    seeds, steps = torch.arange(7) * 3, torch.arange(7) + 100
    for filters in ({}, {"top_k": 30}, {"top_p": 0.9}, {"min_p": 0.1}):
        together, logprobs = draw(logits, seeds=seeds, steps=steps, logprobs=True, **filters)
        single = [
            draw(logits[i : i + 1], seeds=seeds[i], steps=steps[i], logprobs=True, **filters)
            for i in range(7)
        ]
        assert torch.equal(together, torch.cat([a[0] for a in single]))
        assert torch.equal(logprobs, torch.cat([a[1] for a in single]))
        threads = torch.get_num_threads()
        try:
            for count in (1, 3):
                torch.set_num_threads(count)
                assert torch.equal(draw(logits, seeds=seeds, steps=steps, **filters)[0], together)
        finally:
            torch.set_num_threads(threads)
    strided = torch.randn(20_000, 7).T
    assert torch.equal(draw(strided)[0], draw(strided.contiguous())[0])


def test_extreme_logits_return_valid_tokens() -> None:
    logits = torch.full((5, 100), -math.inf)
    logits[0, 7] = -1e30
    logits[1, 3:5] = math.inf
    logits[2] = 3e38
    logits[2, 50:] = -3e38
    logits[3] = math.nan
    logits[3, 9] = 1.0
    logits[4, ::2] = -70000.0
    for name in RUNNABLE:
        with variants.use(name):
            for temperature in (0.0, 1e-4, 1.0, 100.0):
                for filters in ({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.5}):
                    ids, logprobs = draw(logits, temperature, seeds=3, logprobs=True, **filters)
                    assert ids[0] == 7 and ids[1] == 3 and ids[2] < 50 and ids[3] == 9 and ids[4] % 2 == 0
                    assert logprobs[0] == 0 and logprobs[1] == 0 and logprobs[3] == 0


def test_penalties_are_applied_to_probabilities() -> None:
    torch.manual_seed(0)
    logits, prompt, output = torch.randn(1, 9000), torch.tensor([5, 8000]), torch.tensor([7, 7, 8999])
    logits[0, [5, 7, 8999]] = 6.0
    actual = sample_probabilities(
        logits,
        *of_rows(1, 0.8, 0, 1.0, 0.0),
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
