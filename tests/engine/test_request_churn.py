"""Random requests on a memory that is too small for them: nothing is held once all have ended."""

from __future__ import annotations

from random import Random

import pytest

from tests.support.engines import engine_with_blocks
from torch_armllm.engine.llm_engine import LLMEngine
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.text.preprocess import NewRequest

REQUESTS = 80
AT_ONCE = 24


def _add(engine: LLMEngine, random: Random, name: str, beginning: list[int]) -> None:
    rest = [random.randrange(engine.sampler.vocab_size) for _ in range(random.randint(1, 8))]
    temperature = random.choice([0.0, 0.8])
    params = SamplingParams(
        n=2 if temperature and random.random() < 0.25 else 1,
        temperature=temperature,
        max_tokens=random.randint(60, 100) if random.random() < 0.1 else random.randint(1, 12),
        ignore_eos=random.random() < 0.9,
    )
    prompt = beginning[: random.choice([0, 0, 8, 16])] + rest
    engine.add_request(NewRequest(name, prompt, params, priority=random.randrange(3)))


@pytest.mark.parametrize("swap", [False, True])
def test_finished_and_aborted_requests_free_all_blocks(swap: bool) -> None:
    limits = {"max_model_len": 128, "max_num_seqs": 32, "max_num_batched_tokens": 256}
    engine = engine_with_blocks("llama", 8, 8 if swap else 0, speculative_config=None, **limits)
    random = Random(1)
    beginning = [random.randrange(engine.sampler.vocab_size) for _ in range(16)]
    running: set[str] = set()
    ends: dict[str, int] = {}
    added = finished = aborted = steps = 0
    while added < REQUESTS or running:
        while added < REQUESTS and len(running) < AT_ONCE:
            name = str(added)
            _add(engine, random, name, beginning)
            running.add(name)
            added += 1
            if random.random() < 0.1:
                ends[name] = steps + random.randint(0, 8)
        for name in [name for name, step in ends.items() if step <= steps]:
            del ends[name]
            running.discard(name)
            aborted += len(engine.abort_request(name))
        done = [output.request_id for output in engine.step() if output.finished]
        running.difference_update(done)
        finished += len(done)
        steps += 1
    assert finished + aborted == REQUESTS and aborted > 0
    scheduler, blocks = engine.scheduler, engine.scheduler.blocks
    assert scheduler.preemptions > 0
    assert blocks.free == blocks.num_blocks and blocks.swap.free == blocks.swap_blocks
    assert not (scheduler.running or scheduler.waiting or scheduler.swapped)
