"""Sources of draft tokens, and their acceptance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.engine.sampling.test_sampler import likely
from torch_armllm.engine.request import Request
from torch_armllm.engine.sampling.sampler import Sampler
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.scheduling.step import Scheduled, Step
from torch_armllm.engine.speculative.config import SpeculativeConfig
from torch_armllm.engine.speculative.draft_model import DraftModelProposer
from torch_armllm.engine.speculative.drafting import SpeculativeDecoder
from torch_armllm.engine.speculative.ngram import NgramIndex
from torch_armllm.engine.speculative.rejection import accept
from torch_armllm.ops.sample import reference_probabilities

VOCAB = 97


# configuration


def test_speculative_config_is_parsed() -> None:
    found = SpeculativeConfig.parse({"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 1})
    assert (found.num_speculative_tokens, found.prompt_lookup_max, found.prompt_lookup_min) == (6, 1, 1)
    assert SpeculativeConfig.parse({"method": "ngram", "prompt_lookup_min": 7}).prompt_lookup_max == 7
    assert SpeculativeConfig.parse({"method": "draft_model", "model": "x"}).model == "x"


@pytest.mark.parametrize(
    ("given_", "told"),
    [
        ({}, "no 'method'"),
        ({"method": "medusa"}, "'medusa' is none of ngram, draft_model, mtp, eagle3"),
        ({"method": "ngram", "tokens": 3}, "unknown settings tokens"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}, "more than"),
        ({"method": "ngram", "model": "x"}, "has no model, but"),
        ({"method": "draft_model"}, "needs 'model'"),
    ],
)
def test_invalid_speculative_configs_are_rejected(given_: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        SpeculativeConfig.parse(given_)


# n-grams


def plainly(text: list[int], shortest: int, longest: int, count: int) -> list[int]:
    for size in range(longest, shortest - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if len(text) >= size and text[end - size : end] == text[len(text) - size :]:
                found = list(text)
                for i in range(count):
                    found.append(found[end + i])
                return found[len(text) :]
    return []


@settings(max_examples=60, deadline=None)
@given(
    text=st.lists(st.integers(0, 3), max_size=40),
    begin=st.integers(0, 10),
    runs=st.sampled_from(((1, 1), (1, 3), (2, 4))),
    count=st.integers(1, 6),
)
def test_ngram_lookup_agrees_with_a_linear_search(
    text: list[int], begin: int, runs: tuple[int, int], count: int
) -> None:
    index = NgramIndex(*runs)
    for length in range(min(begin, len(text)), len(text) + 1):
        assert index.propose(text[:length], count) == plainly(text[:length], *runs, count)


# rejection sampling


class FixedLogits:
    """A model whose logits depend on the position only."""

    block_size, vocab_size = 16, 20

    def __init__(self, seed: int) -> None:
        self.table = torch.randn(8, 20, generator=torch.Generator().manual_seed(seed)) * 1.5

    def execute(self, step: Step) -> Tensor:
        return torch.cat([self.table[p : p + 1] for s in step.scheduled for p in s.logit_positions])


@pytest.mark.parametrize("rejection", [True, False])
@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.7, "top_k": 9}, {"top_p": 0.8, "logit_bias": {3: 2.0}}, {"temperature": 0.0}],
    ids=str,
)
def test_sampled_drafts_keep_the_output_distribution(params: dict[str, Any], rejection: bool) -> None:
    count, length = 800, 3
    target, sampler = FixedLogits(0), Sampler(20)
    proposer = DraftModelProposer(FixedLogits(1), 10**4, sampler, 10**5, rejection=rejection)
    speculative_decoder = SpeculativeDecoder(proposer, sampler, 2)
    sequences = [
        Request("r", [5], SamplingParams(max_tokens=length, **params), seed).sequences[0]
        for seed in range(count)
    ]
    while going := [a for a in sequences if a.output_length < length]:
        speculative_decoder.propose(going)
        drafts = [len(a.draft) for a in going]
        steps = [Scheduled(a, len(a.token_ids) - 1, 1 + k) for a, k in zip(going, drafts, strict=True)]
        for a, found in zip(
            going, speculative_decoder.verify(target.execute(Step(steps)), going, drafts), strict=True
        ):
            a.token_ids += [drawn.token_id for drawn in found]
    for place in range(length):
        logits = target.table[place].clone()
        for token, bias in params.get("logit_bias", {}).items():
            logits[token] += bias
        settings_ = [params.get("temperature", 1.0), params.get("top_k", 0), params.get("top_p", 1.0), 0.0]
        drawn = torch.tensor([a.output_token_ids[place] for a in sequences])
        assert likely(torch.bincount(drawn, minlength=20), reference_probabilities(logits, *settings_))
    assert speculative_decoder.acceptance.accepted > 0 or not params.get("temperature", 1.0)


def test_rejection_sampling_accepts_more_drafts() -> None:
    """The acceptance rate is the overlap of the distributions; coupled random numbers reach less."""
    torch.manual_seed(0)
    p, q = (torch.randn(30).softmax(-1) for _ in range(2))
    numbers = torch.rand(4000, 3, dtype=torch.float64)
    drafts = torch.searchsorted(q.double().cumsum(0), numbers[:, 0].contiguous())
    stay, tokens = 0, []
    for draft, (_, keeps, instead) in zip(drafts.tolist(), numbers.tolist(), strict=True):
        number, other = accept([draft], q[None], p[None], lambda _, i, u=(keeps, instead): u[i])  # noqa: B023
        stay += number
        tokens.append(draft if other is None else other)
    assert likely(torch.bincount(torch.tensor(tokens), minlength=30), p.double())
    overlap = float(torch.minimum(p, q).sum())
    assert stay / 4000 == pytest.approx(overlap, abs=0.03)
