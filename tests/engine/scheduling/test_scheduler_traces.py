"""Long random runs of the scheduler with fewer blocks than the requests need."""

from __future__ import annotations

from functools import cache
from random import Random

import pytest

from tests.support.simulation import VOCABULARY, Simulation, next_token, request
from torch_armllm.engine.request import Sequence
from torch_armllm.engine.scheduling.scheduler import SchedulerConfig
from torch_armllm.kv_cache.block_manager import BlockManager

SHARED = [next_token([i], 0) for i in range(30)]


@cache
def trace(seed: int) -> Simulation:
    """Requests arrive and are aborted for 150 steps; then the run continues until none is left."""
    random = Random(seed)
    block_size = random.choice([1, 2, 4])
    positions = random.choice([24, 40, 64])
    swap = random.choice([0, 4, 200])
    caching = random.random() < 0.7
    chunked = random.random() < 0.7
    max_num_seqs = random.randint(1, 8)
    states = (max_num_seqs, random.choice([0, 2, 8]), random.choice([1, 2, 4, 20])) if seed % 2 else ()
    blocks = BlockManager(positions // block_size, block_size, swap, caching, *states)
    budget = max_num_seqs + random.randint(0, 12) if chunked else 40 + random.randint(0, 20)
    config = SchedulerConfig(max_num_seqs, budget, 40, chunked, "swap" if swap else "recompute")
    simulation = Simulation(config, blocks)
    often = random.choice([0.2, 0.6, 1.0])
    aborts = random.choice([0.0, 0.1])
    drafts = random.choice([0, 0, 6])

    def draft(sequence: Sequence) -> list[int]:
        text = list(sequence.token_ids)
        for _ in range(random.randint(0, drafts)):
            right = random.random() < 0.7
            text.append(next_token(text, sequence.index) if right else random.randrange(VOCABULARY))
        return text[len(sequence.token_ids) :]

    def name() -> str:
        return str(random.randrange(len(simulation.requests)))

    for i in range(150):
        if i == 0 or random.random() < often:
            beginning = SHARED[: random.choice([0, 4, 8, random.randint(0, 20)])]
            prompt = beginning + [random.randrange(VOCABULARY) for _ in range(random.randint(1, 6))]
            prompt = prompt[: simulation.scheduler.max_length - 1]
            n = random.choice([1, 1, 1, min(4, max_num_seqs)])
            priority, logprobs = random.choice([0, 0, 1, -1]), random.choice([None, None, None, 0])
            settings = {"n": n, "priority": priority, "max_tokens": random.randint(1, 20)}
            simulation.add(
                request(str(len(simulation.requests)), prompt, prompt_logprobs=logprobs, **settings)
            )
        if random.random() < aborts:
            simulation.scheduler.abort(name())
        simulation.step(draft, name() if random.random() < aborts else None)
    while simulation.scheduler.has_unfinished:
        simulation.step(draft)
        assert len(simulation.steps) < 5000, "it does not end"
    return simulation


@pytest.mark.parametrize("seed", range(40))
def test_every_request_ends_with_its_own_tokens(seed: int) -> None:
    simulation = trace(seed)
    simulation.check_end()
    preemptions = sum(r.metrics.preemptions for r in simulation.requests)
    assert simulation.scheduler.preemptions == preemptions == sum(len(s.preempted) for s in simulation.steps)


def test_random_runs_cover_the_hard_cases() -> None:
    """Guards the test above: the runs must keep covering the hard cases."""
    runs = [trace(seed) for seed in range(40)]
    steps = [step for run in runs for step in run.steps]
    for kind in ("swaps_out", "swaps_in", "copies", "preempted"):
        assert sum(bool(getattr(step, kind)) for step in steps) > 100, kind
    kinds = [move.kind for step in steps for move in step.state_moves]
    assert min(map(kinds.count, ("copy", "swap_in", "swap_out"))) > 100
    assert sum(step.saves_states for step in steps) > 1000
    hits = [
        run.blocks.prefix_cache.tokens_hit for run in runs if run.blocks.states and run.blocks.prefix_cache
    ]
    assert sum(hits) > 300
    caches = [run.blocks.prefix_cache for run in runs if run.blocks.prefix_cache is not None]
    assert sum(cache.tokens_hit for cache in caches) > 1000
    assert sum(not s.samples for step in steps for s in step.scheduled) > 100


def test_schedule_is_deterministic() -> None:
    def moves(simulation: Simulation) -> list[object]:
        return [
            [
                [(s.sequence.request.request_id, s.sequence.index, s.start, s.count) for s in step.scheduled],
                [step.swaps_out, step.swaps_in, step.copies, step.state_moves],
            ]
            for step in simulation.steps
        ]

    assert moves(trace.__wrapped__(3)) == moves(trace(3))
    assert moves(trace(3)) != moves(trace(4))
