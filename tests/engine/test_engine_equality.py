"""Outputs have the same tokens and log-probabilities, bit for bit, whatever else the engine computes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.engines import engine_with_blocks, make_engine
from tests.support.models import token_ids
from torch_armllm.engine.llm_engine import LLMEngine
from torch_armllm.engine.outputs import RequestOutput
from torch_armllm.engine.request import Request
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.scheduling.step import Step
from torch_armllm.engine.text.preprocess import NewRequest

LONGEST = 160
TEXT: list[int] = token_ids(1, LONGEST, seed=0)[0].tolist()
"""Common prefix of prompts, so that they share blocks."""


@dataclass(frozen=True)
class RequestSpec:
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


def run(engine: LLMEngine, specs: list[RequestSpec], every: int = 0) -> list[Any]:
    """Runs requests, a new one every ``every`` steps (0: all in the first step); returns their outputs."""
    waiting = list(enumerate(specs))
    done: dict[int, Any] = {}
    steps = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and steps >= every * waiting[0][0]:
            number, spec = waiting.pop(0)
            engine.add_request(NewRequest(str(number), spec.prompt, spec.params, spec.priority))
        for output in engine.step():
            if output.finished:
                done[int(output.request_id)] = sequences(output)
        steps += 1
    blocks = engine.scheduler.blocks
    assert blocks.free == blocks.num_blocks and blocks.swap.free == blocks.swap_blocks
    return [done[number] for number in range(len(specs))]


@functools.cache
def alone(family: str, spec: RequestSpec) -> list[Any]:
    """Returns the output of a request that runs alone in an engine of its own."""
    engine = make_engine(
        family, max_model_len=LONGEST, max_num_batched_tokens=256, enable_prefix_caching=False
    )
    return run(engine, [spec])[0]


NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
MIXED = [
    RequestSpec(shared=70, own=9, seed=1, max_tokens=50),
    RequestSpec(shared=70, own=3, seed=2, temperature=0.9, max_tokens=60),
    RequestSpec(shared=0, own=40, seed=3, temperature=0.7, n=3, max_tokens=40),
    RequestSpec(shared=96, own=0, seed=4, max_tokens=30),
    RequestSpec(shared=100, own=20, seed=5, temperature=1.2, max_tokens=30),
    RequestSpec(shared=0, own=1, seed=6, max_tokens=70),
]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_batching_and_chunking_do_not_change_outputs(family: str) -> None:
    engine = make_engine(family, max_model_len=LONGEST, max_num_seqs=8, max_num_batched_tokens=11)
    assert run(engine, MIXED) == [alone(family, spec) for spec in MIXED]
    assert engine.stats.totals.steps > 30 and engine.stats.totals.preemptions == 0


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_prefix_cache_does_not_change_outputs(family: str) -> None:
    engine = make_engine(family, max_model_len=LONGEST)
    again = [*MIXED, *MIXED]
    assert run(engine, again, every=8) == [alone(family, spec) for spec in again]
    assert engine.scheduler.blocks.hit_rate > 0.4


@pytest.mark.parametrize("swap_blocks", [0, 4, 20])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_preemption_does_not_change_outputs(
    family: str, swap_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_with_blocks(
        family, 6, swap_blocks, max_model_len=LONGEST, max_num_seqs=8, enable_prefix_caching=False
    )
    steps: list[Step] = []
    move = engine.runner.copy_blocks  # type: ignore[attr-defined]
    monkeypatch.setattr(engine.runner, "copy_blocks", lambda step: steps.append(step) or move(step))
    assert run(engine, MIXED) == [alone(family, spec) for spec in MIXED]
    assert engine.stats.totals.preemptions > 1
    assert any(step.swaps_in for step in steps) == (swap_blocks > 0)


def test_custom_scheduling_policy_sets_the_order() -> None:
    class LastFirst:
        def sort_key(self, request: Request) -> float:
            return -float(request.request_id)

    engine = make_engine(max_num_seqs=1, scheduling_policy=LastFirst())
    for number in range(3):
        engine.add_request(NewRequest(str(number), [1, 2], SamplingParams(max_tokens=1)))
    assert [engine.step()[0].request_id for _ in range(3)] == ["2", "1", "0"]


def test_drafts_and_preemption_do_not_change_outputs() -> None:
    engine = engine_with_blocks("llama", 7, 5, max_model_len=LONGEST, speculative_config=NGRAM)
    assert run(engine, MIXED) == [alone("llama", spec) for spec in MIXED]
    assert engine.stats.totals.accepted_tokens > 0 and engine.stats.totals.preemptions > 0


requests = st.builds(
    RequestSpec,
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
    specs=st.lists(requests, min_size=2, max_size=7),
    every=st.integers(0, 3),
    blocks=st.sampled_from([5, 7, 12]),
    swap_blocks=st.sampled_from([0, 12]),
    max_num_seqs=st.integers(2, 8),
    tokens=st.sampled_from([8, 40, LONGEST]),
    caching=st.booleans(),
    chunked=st.booleans(),
)
def test_random_requests_equal_single_runs(
    specs: list[RequestSpec],
    every: int,
    blocks: int,
    swap_blocks: int,
    max_num_seqs: int,
    tokens: int,
    caching: bool,
    chunked: bool,
) -> None:
    engine = engine_with_blocks(
        "llama",
        blocks,
        swap_blocks,
        max_model_len=LONGEST,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=tokens if chunked else LONGEST,
        enable_prefix_caching=caching,
        enable_chunked_prefill=chunked,
    )
    assert run(engine, specs, every) == [alone("llama", spec) for spec in specs]
