"""Counts and rates of steps, with a clock that the test controls."""

from __future__ import annotations

import logging

import pytest

from torch_armllm.engine.reports.stats import EngineStats, Gauges
from torch_armllm.engine.request import Request, Sequence
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.scheduling.step import Scheduled, Step


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def sequence(prompt: int, output: int = 0, draft: int = 0) -> Sequence:
    made = Request("r", list(range(prompt)), SamplingParams(), 0).sequences[0]
    made.token_ids += range(output)
    made.draft = list(range(draft))
    return made


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stats(clock: Clock) -> EngineStats:
    return EngineStats(lambda: Gauges(3, 4, 0.125, 0.5), clock=clock)


def run(stats: EngineStats, clock: Clock, seconds: float, *entries: tuple[Scheduled, list[int]]) -> None:
    began = clock.now
    clock.now += seconds
    drawn = {scheduled.sequence: tokens for scheduled, tokens in entries if tokens}
    stats.record(Step([scheduled for scheduled, _ in entries]), drawn, began, clock.now)


def test_prompt_output_and_draft_tokens_are_counted_separately(stats: EngineStats, clock: Clock) -> None:
    prefilling, last, decoding, verifying = (
        sequence(100),
        sequence(10),
        sequence(5, 3),
        sequence(4, 2, draft=3),
    )
    run(
        stats,
        clock,
        1,
        (Scheduled(prefilling, 16, 32), []),
        (Scheduled(last, 4, 6), [7]),
        (Scheduled(decoding, 7, 1), [8]),
        (Scheduled(verifying, 5, 4), [1, 2]),
    )
    totals = stats.totals
    assert (totals.steps, totals.prompt_tokens, totals.generation_tokens) == (1, 38, 4)
    assert (totals.draft_rounds, totals.draft_tokens, totals.accepted_tokens) == (1, 3, 1)


def test_rates_are_logged_every_ten_seconds(
    stats: EngineStats, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    some = Scheduled(sequence(5, 3), 7, 1)
    for _ in range(25):
        run(stats, clock, 1, (Scheduled(sequence(50), 0, 20), []), (some, [1]))
    rates = (
        "Avg prompt throughput: 20.0 tokens/s, Avg generation throughput: 1.0 tokens/s, "
        "Running: 3 reqs, Waiting: 4 reqs, KV cache usage: 12.5%, Prefix cache hit rate: 50.0%"
    )
    assert caplog.messages == [rates, rates]


def test_log_line_contains_draft_acceptance(
    stats: EngineStats, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run(stats, clock, 10, (Scheduled(sequence(4, 2, draft=4), 5, 5), [1, 2, 3, 4]))
    assert caplog.messages[0].endswith(", Draft acceptance rate: 75.0%, Mean acceptance length: 4.00")


def test_rates_exclude_idle_time_and_include_long_steps(
    stats: EngineStats, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    some = Scheduled(sequence(5, 3), 7, 1)
    run(stats, clock, 4, (some, [1]))
    clock.now += 1000
    run(stats, clock, 4, (some, [1]))
    assert not caplog.messages
    run(stats, clock, 12, (some, [1]))
    assert len(caplog.messages) == 1
    assert "generation throughput: 0.1 tokens/s" in caplog.messages[0]  # 3 tokens in 20 s


def test_disabled_log_prints_nothing(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stats = EngineStats(lambda: Gauges(0, 0, 0.0, 0.0), log=False, clock=clock)
    run(stats, clock, 30, (Scheduled(sequence(5), 0, 5), [1]))
    assert not caplog.messages
    assert stats.totals.generation_tokens == 1
