"""A failed step ends the requests that were part of it, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.engines import engine_with_blocks, generate_token_ids, make_engine, submit
from tests.support.patched_models import patched
from torch_armllm import LLM, AsyncLLM, SamplingParams
from torch_armllm.engine.llm_engine import LLMEngine
from torch_armllm.engine.scheduling.step import Step
from torch_armllm.llm.async_llm import StepFailedError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(n=2, seed=3, max_tokens=12, ignore_eos=True)
PROMPTS = [[number + 2, 3, 5] * (9 + number) for number in range(5)]
SMALL = {"max_num_seqs": 3, "kv_cache_memory": 1 << 20}


class Failing:
    """Wraps a function of an engine; the n-th call fails."""

    def __init__(self, work: Callable[..., Any], at: int, first: bool) -> None:
        self.work, self.left, self.first = work, at, first

    def __call__(self, *arguments: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            if not self.first:
                self.work(*arguments)
            raise RuntimeError("a broken part")
        return self.work(*arguments)


def nothing_is_held(engine: LLMEngine) -> bool:
    blocks = engine.scheduler.blocks
    free = blocks.free == blocks.num_blocks and blocks.swap.free == blocks.swap_blocks
    return free and not engine.has_unfinished_requests() and not engine.scheduler.has_unfinished


def run_on(engine: LLMEngine) -> tuple[dict[str, list[list[int]]], set[str]]:
    """Returns outputs of the finished requests, and the ids of the requests that failed steps ended."""
    done: dict[str, list[list[int]]] = {}
    ended: set[str] = set()
    while engine.has_unfinished_requests():
        try:
            for output in engine.step():
                if output.finished:
                    done[output.request_id] = [completion.token_ids for completion in output.outputs]
        except StepFailedError as error:
            ended |= set(error.request_ids)
    return done, ended


@pytest.mark.parametrize(
    "part", ["runner.begin", "runner.finish", "_verify", "_append_tokens", "scheduler.complete", "_outputs"]
)
def test_failed_step_does_not_affect_other_requests(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [GREEDY, SAMPLED, GREEDY, SAMPLED, GREEDY]
    engine = make_engine(**SMALL)
    expected = generate_token_ids(engine, PROMPTS, params)
    *path, name = part.split(".")
    owner: Any = getattr(engine, path[0]) if path else engine
    for first, at in ((True, 1), (True, 5), (False, 2), (False, 13)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, Failing(getattr(owner, name), at, first))
            submit(engine, PROMPTS, params)
            done, ended = run_on(engine)
        assert ended and not ended & set(done) and len(done) + len(ended) == len(PROMPTS)
        assert all(tokens == expected[int(number)] for number, tokens in done.items())
        assert nothing_is_held(engine)
    assert generate_token_ids(engine, PROMPTS, params) == expected


def test_failed_step_ends_the_sequences_being_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with_blocks("llama", 6, 20, max_model_len=128, max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    expected = generate_token_ids(engine, PROMPTS, params)
    assert engine.scheduler.preemptions
    begin, failed = engine.runner.begin, []

    def fail_when_swapping(step: Step, best: bool) -> None:
        if step.swaps_out and not failed:
            failed.append([sequence.request.request_id for sequence in step.preempted])
            raise RuntimeError("a broken part")
        begin(step, best)

    monkeypatch.setattr(engine.runner, "begin", fail_when_swapping)
    submit(engine, PROMPTS, params)
    done, ended = run_on(engine)
    assert failed and set(failed[0]) <= ended and done
    assert all(tokens == expected[int(name)] for name, tokens in done.items())
    assert nothing_is_held(engine)


def test_generate_works_after_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(patched("llama"), skip_tokenizer_init=True, **SMALL)
    expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    runner = llm.llm_engine.runner
    monkeypatch.setattr(runner, "begin", Failing(runner.begin, 4, True))
    with pytest.raises(StepFailedError, match="a broken part") as failure:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert isinstance(failure.value.__cause__, RuntimeError)
    assert nothing_is_held(llm.llm_engine)
    again = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in again] == expected


def test_async_engine_continues_after_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = AsyncLLM(patched("llama"), skip_tokenizer_init=True, disable_log_stats=True, **SMALL)
    runner = llm.llm_engine.runner

    async def generate(prompt: list[int]) -> list[int]:
        outputs = [output async for output in llm.generate({"prompt_token_ids": prompt}, GREEDY)]
        return outputs[-1].outputs[0].token_ids

    async def main() -> None:
        expected = [await generate(prompt) for prompt in PROMPTS]
        monkeypatch.setattr(runner, "begin", Failing(runner.begin, 4, True))
        found = await asyncio.gather(*map(generate, PROMPTS), return_exceptions=True)
        failed = [isinstance(tokens, StepFailedError) for tokens in found]
        assert 1 <= sum(failed) <= SMALL["max_num_seqs"]
        assert all(f or t == e for f, t, e in zip(failed, found, expected, strict=True))
        assert [await generate(prompt) for prompt in PROMPTS] == expected and not llm.errored

    try:
        asyncio.run(main())
    finally:
        llm.shutdown()
    assert nothing_is_held(llm.llm_engine)
