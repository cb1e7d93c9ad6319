"""The chunk budget: prompt tokens per step while other sequences decode."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import pytest
import torch

from tests.support.engines import make_engine
from tests.support.simulation import Simulation, request, simulation
from torch_armllm.engine.images.image_rows import PictureRows
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.scheduling.chunk_budget import ChunkBudget, PrefillBudget
from torch_armllm.engine.text.preprocess import NewRequest

ALONE = 0.04
"""Seconds of a decode-only step on the simulated machine."""


def seconds(run: Simulation, per_token: float) -> float:
    """Returns the simulated duration of the last step; a prompt token costs more the more it attends to."""
    added = 0.0
    for sequence, start, count in run.steps[-1].scheduled:
        if start < sequence.prompt_length:
            added += count * per_token * (1 + start / 700)
    return ALONE + added


def paced(per_token: float, most: float | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """Yields the durations of the steps that prefill a long prompt while two sequences decode."""
    run = simulation(2000, max_model_len=4000, max_num_seqs=4, max_num_batched_tokens=512, max_step_time=most)
    note = run.scheduler.record_time
    monkeypatch.setattr(run.scheduler, "record_time", lambda step, _: note(step, seconds(run, per_token)))
    for number in range(2):
        run.add(request(str(number), [number] * 40, max_tokens=600))
    for _ in range(5):
        run.step()
    long = run.add(request("long", [1] * 3000))
    while long.sequences[0].output_length == 0:
        run.step()
        yield seconds(run, per_token)


def test_step_time_stays_within_limit_for_long_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = list(paced(0.001, 0.2, monkeypatch))
    assert max(limited[1:]) < 0.23  # the first chunk is sized by steps of prompts alone
    assert all(taken > 0.15 for taken in limited[2:-1])
    assert max(paced(0.001, None, monkeypatch)) > 2


def test_chunks_have_a_minimum_size_on_slow_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = list(paced(0.001, 0.01, monkeypatch))
    assert len(limited) < 3000 / 32 + 3  # never less than 32 tokens
    assert pytest.approx(limited[2], rel=0.2) == 2 * ALONE


def test_outlier_step_time_is_forgotten() -> None:
    chunk_budget = ChunkBudget(0.2)
    assert chunk_budget.work() == float("inf")
    chunk_budget.record(0, 0.05)
    chunk_budget.record(100, 0.15)
    assert chunk_budget.work() == pytest.approx(150)
    chunk_budget.record(100, 5.0)
    assert chunk_budget.work() < 10
    for _ in range(8):
        chunk_budget.record(32, 0.05 + 0.032)
    assert chunk_budget.work() == pytest.approx(150, rel=0.2)


def test_prefill_budget_charges_longer_contexts_more() -> None:
    budget = PrefillBudget(512, 300.0)
    assert budget.take(0, 100) == 100 and budget.any
    assert budget.take(2048, 500) == 100 and not budget.any
    narrow = PrefillBudget(20, 1.0)
    assert narrow.take(4096, 500) == 20 and not narrow.any


def test_max_step_time_does_not_change_outputs() -> None:
    prompts = [[number + 2, 3, 5] * 20 for number in range(4)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    found = []
    for most in (None, 1e-6, 0.2):
        engine = make_engine(max_num_batched_tokens=64, max_step_time=most)
        sequences = {}
        for number, prompt in enumerate(prompts):
            engine.add_request(NewRequest(str(number), prompt, params))
            for _ in range(2):
                sequences |= {o.request_id: o.outputs[0].token_ids for o in engine.step()}
        while engine.has_unfinished_requests():
            sequences |= {o.request_id: o.outputs[0].token_ids for o in engine.step()}
        found.append(sequences)
    assert found[0] == found[1] == found[2]


def test_zero_max_step_time_raises() -> None:
    with pytest.raises(ValueError, match="max_step_time = 0: give seconds above 0, or None"):
        make_engine(max_step_time=0)


@pytest.mark.parametrize(
    ("tokens", "work", "start", "taken", "left"),
    [
        (100, inf, 0, 100, 0),  # all of it
        (9, inf, 0, 4, 5),  # before a span that is longer
        (14, inf, 0, 14, 0),  # to its end
        (9, inf, 4, 0, 0),  # none of it, and nobody else takes the room
        (10, inf, 4, 10, 0),
        (50, inf, 4, 50, 0),
        (50, 8.0, 4, 10, 40),  # whole, though work is left for less
        (6, inf, 8, 6, 0),  # the rest, after what the prefix cache has
        (5, inf, 8, 0, 0),
        (30, inf, 14, 6, 24),  # to the next one
    ],
)
def test_spans_are_computed_whole(tokens: int, work: float, start: int, taken: int, left: int) -> None:
    budget = PrefillBudget(tokens, work, used=1.0)
    assert budget.take(start, 100 - start if tokens != 30 else 10, [(4, 14), (20, 30)]) == taken
    assert budget.tokens == left


def test_prompt_waits_for_room_for_a_whole_picture() -> None:
    run = simulation(2000, caching=False, max_num_seqs=4, max_num_batched_tokens=12)
    shown = request("shown", list(range(40)))
    shown.pictures = PictureRows(list(range(5, 15)), torch.randn(10, 4), spans=[(5, 15)])
    for name in ("a", "b", "c"):
        run.add(request(name, [1, 2, 3], max_tokens=20))
    run.add(shown)
    chunks = []
    for _ in range(60):
        if not run.scheduler.has_unfinished:
            break
        run.step()
        chunks += [(s.start, s.end) for s in run.steps[-1].scheduled if s.sequence.request is shown]
    assert any(start <= 5 and end >= 15 for start, end in chunks) and 40 in {end for _, end in chunks}
    assert all(end <= 5 or end >= 15 for _, end in chunks)
