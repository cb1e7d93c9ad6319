"""Outputs have the same tokens and log-probabilities, bit for bit, whatever else the engine computes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.engines import engine, tight
from tests.support.models import token_ids
from torch_armllm.engine.llm_engine import LLMEngine
from torch_armllm.engine.outputs import RequestOutput
from torch_armllm.engine.request import Request
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.step import Step

LONGEST = 160
TEXT: list[int] = token_ids(1, LONGEST, seed=0)[0].tolist()
"""Common prefix of prompts, so that they share blocks."""


@dataclass(frozen=True)
class Asked:
    """A prompt of a shared prefix and tokens of its own, with its sampling parameters."""

    shared: int
    own: int
    seed: int
    temperature: float = 0.0
    n: int = 1
    max_tokens: int = 12
    priority: int = 0

    @property
    def prompt(self) -> list[int]:
        own: list[int] = token_ids(1, self.own, seed=1000 + self.seed)[0].tolist()
        return TEXT[: self.shared] + own

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            n=self.n if self.temperature else 1,
            seed=self.seed,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            logprobs=1,
            ignore_eos=True,
        )


def sequences(output: RequestOutput) -> list[Any]:
    """Returns tokens and their exact log-probabilities."""
    return [(sequence.token_ids, sequence.logprobs) for sequence in output.outputs]


def run(on: LLMEngine, asked: list[Asked], every: int = 0) -> list[Any]:
    """Runs requests that arrive ``every`` so many steps (0: all at once); returns their outputs."""
    waiting = list(enumerate(asked))
    done: dict[int, Any] = {}
    steps = 0
    while waiting or on.has_unfinished_requests():
        while waiting and steps >= every * waiting[0][0]:
            number, one = waiting.pop(0)
            on.add_request(str(number), one.prompt, one.params, one.priority)
        for output in on.step():
            if output.finished:
                done[int(output.request_id)] = sequences(output)
        steps += 1
    blocks = on.scheduler.blocks
    assert blocks.free == blocks.num_blocks and blocks.swap.free == blocks.swap_blocks
    return [done[number] for number in range(len(asked))]


@functools.cache
def alone(family: str, asked: Asked) -> list[Any]:
    """Returns the output of a request that runs alone in an engine of its own."""
    on = engine(family, max_model_len=LONGEST, max_num_batched_tokens=256, enable_prefix_caching=False)
    return run(on, [asked])[0]


NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
MIXED = [
    Asked(shared=70, own=9, seed=1, max_tokens=50),
    Asked(shared=70, own=3, seed=2, temperature=0.9, max_tokens=60),
    Asked(shared=0, own=40, seed=3, temperature=0.7, n=3, max_tokens=40),
    Asked(shared=96, own=0, seed=4, max_tokens=30),
    Asked(shared=100, own=20, seed=5, temperature=1.2, max_tokens=30),
    Asked(shared=0, own=1, seed=6, max_tokens=70),
]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_batching_and_chunking_do_not_change_outputs(family: str) -> None:
    on = engine(family, max_model_len=LONGEST, max_num_seqs=8, max_num_batched_tokens=11)
    assert run(on, MIXED) == [alone(family, one) for one in MIXED]
    assert on.stats.totals.steps > 30 and on.stats.totals.preemptions == 0


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_prefix_cache_does_not_change_outputs(family: str) -> None:
    on = engine(family, max_model_len=LONGEST)
    again = [*MIXED, *MIXED]
    assert run(on, again, every=8) == [alone(family, one) for one in again]
    assert on.scheduler.blocks.hit_rate > 0.4


@pytest.mark.parametrize("swap_blocks", [0, 4, 20])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_preemption_does_not_change_outputs(
    family: str, swap_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = tight(family, 6, swap_blocks, max_model_len=LONGEST, max_num_seqs=8, enable_prefix_caching=False)
    steps: list[Step] = []
    move = on.runner.copy_blocks  # type: ignore[attr-defined]
    monkeypatch.setattr(on.runner, "copy_blocks", lambda step: steps.append(step) or move(step))
    assert run(on, MIXED) == [alone(family, one) for one in MIXED]
    assert on.stats.totals.preemptions > 1
    assert any(step.swaps_in for step in steps) == (swap_blocks > 0)


def test_custom_scheduling_policy_sets_the_order() -> None:
    class LastFirst:
        def sort_key(self, request: Request) -> float:
            return -float(request.request_id)

    on = engine(max_num_seqs=1, scheduling_policy=LastFirst())
    for number in range(3):
        on.add_request(str(number), [1, 2], SamplingParams(max_tokens=1))
    assert [on.step()[0].request_id for _ in range(3)] == ["2", "1", "0"]


def test_drafts_and_preemption_do_not_change_outputs() -> None:
    on = tight("llama", 7, 5, max_model_len=LONGEST, speculative_config=NGRAM)
    assert run(on, MIXED) == [alone("llama", one) for one in MIXED]
    assert on.stats.totals.accepted_tokens > 0 and on.stats.totals.preemptions > 0


requests = st.builds(
    Asked,
    shared=st.sampled_from([0, 31, 32, 64, 70]),
    own=st.integers(1, 30),
    seed=st.integers(0, 2),
    temperature=st.sampled_from([0.0, 0.9]),
    n=st.sampled_from([1, 1, 2]),
    max_tokens=st.sampled_from([1, 5, 50]),
    priority=st.integers(0, 1),
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    asked=st.lists(requests, min_size=2, max_size=7),
    every=st.integers(0, 3),
    blocks=st.sampled_from([5, 7, 12]),
    swap_blocks=st.sampled_from([0, 12]),
    max_num_seqs=st.integers(2, 8),
    tokens=st.sampled_from([8, 40, LONGEST]),
    caching=st.booleans(),
    chunked=st.booleans(),
)
def test_random_requests_equal_single_runs(
    asked: list[Asked],
    every: int,
    blocks: int,
    swap_blocks: int,
    max_num_seqs: int,
    tokens: int,
    caching: bool,
    chunked: bool,
) -> None:
    on = tight(
        "llama",
        blocks,
        swap_blocks,
        max_model_len=LONGEST,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=tokens if chunked else LONGEST,
        enable_prefix_caching=caching,
        enable_chunked_prefill=chunked,
    )
    assert run(on, asked, every) == [alone("llama", one) for one in asked]
