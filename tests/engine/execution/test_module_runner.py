"""The runner of models without a plan, compared with `generate`: forks, chunks and preemption."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch

import torch_armllm
from tests.support.engines import MEMORY, generate_token_ids
from torch_armllm.engine.build import build_engine
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.execution.module_runner import ModuleRunner
from torch_armllm.engine.llm_engine import LLMEngine
from torch_armllm.engine.request import Request, Sequence, Status
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.scheduling.step import Scheduled, Step
from torch_armllm.model_survey.tiny_models import tiny_ids, tiny_model

FAMILIES = ["mamba2", "recurrent_gemma", "rwkv", "bloom", "xlnet"]
NEW = 6


@functools.cache
def model_of(family: str) -> Any:
    model = tiny_model(family)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def sequence_of(length: int, **params: Any) -> Sequence:
    prompt = tiny_ids(1, length, seed=length)[0].tolist()
    return Request(str(length), prompt, SamplingParams(**params), seed=0).sequences[0]


def generated(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


def engine_of(model: Any, **settings: Any) -> LLMEngine:
    return build_engine(model, None, EngineConfig(kv_cache_memory=MEMORY, max_model_len=64, **settings))


def rest(sequence: Sequence) -> Scheduled:
    """Schedules all tokens of a sequence that are not computed."""
    return Scheduled(sequence, sequence.computed, len(sequence.token_ids) - sequence.computed)


def advance(runner: ModuleRunner, *sequences: Sequence) -> None:
    """Computes a step and appends the most probable tokens."""
    logits = runner.execute(Step([rest(sequence) for sequence in sequences]))
    for sequence, row in zip(sequences, logits, strict=True):
        sequence.computed = len(sequence.token_ids)
        sequence.token_ids.append(int(row.argmax()))


@pytest.mark.parametrize("family", FAMILIES)
def test_interleaved_sequences_equal_generate(family: str) -> None:
    model = model_of(family)
    runner = ModuleRunner(model)
    first, second = sequence_of(11), sequence_of(5)
    advance(runner, first)
    for _ in range(NEW - 1):
        advance(runner, second, first)
    advance(runner, second)
    for sequence in (first, second):
        assert sequence.output_token_ids == generated(model, sequence.request.prompt_token_ids)


def test_fork_continues_from_a_copy_of_the_cache() -> None:
    model = model_of("mamba2")
    runner = ModuleRunner(model)
    first = sequence_of(9)
    advance(runner, first)
    others = [Sequence(first.request, i, [*first.token_ids[:9], i + 20], computed=9) for i in (1, 2)]
    first.request.sequences += others
    advance(runner, first, others[0])
    advance(runner, others[1], first)  # the first one has advanced: the prompt is prefilled again
    for sequence in others:
        (expected,) = runner.execute(Step([Scheduled(sequence_like(sequence), 0, 10)]))
        assert sequence.token_ids[10] == int(expected.argmax())


def sequence_like(sequence: Sequence) -> Sequence:
    """Returns a new request whose prompt is the first 10 tokens of a sequence."""
    return Request("other", sequence.token_ids[:10], SamplingParams(), seed=0).sequences[0]


def test_prompt_chunks_are_computed_with_the_last_one() -> None:
    model = model_of("recurrent_gemma")
    runner = ModuleRunner(model)
    sequence = sequence_of(11)
    assert runner.execute(Step([Scheduled(sequence, 0, 4)])).shape == (0, runner.vocab_size)
    sequence.computed = 4
    advance(runner, sequence)
    assert sequence.output_token_ids == generated(model, sequence.request.prompt_token_ids)[:1]
    every = sequence_of(11, prompt_logprobs=0)
    parts = [runner.execute(Step([Scheduled(every, *part)])) for part in ((0, 4), (4, 7))]
    with torch.no_grad():
        whole = model(torch.tensor([every.token_ids])).logits[0]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-4)


def test_preempted_sequence_is_prefilled_again() -> None:
    model = model_of("rwkv")
    runner = ModuleRunner(model)
    sequence, other = sequence_of(11), sequence_of(5)
    advance(runner, sequence)
    advance(runner, sequence)
    runner.execute(Step([rest(other)], preempted=[sequence]))
    assert sequence not in runner._texts
    sequence.computed = 0
    for _ in range(NEW - 2):
        advance(runner, sequence)
    assert sequence.output_token_ids == generated(model, sequence.request.prompt_token_ids)


def test_finished_and_deleted_sequences_are_dropped() -> None:
    runner = ModuleRunner(model_of("mamba2"))
    first, second, third = sequence_of(4), sequence_of(5), sequence_of(6)
    advance(runner, first, second, third)
    assert len(runner._texts) == 3
    first.status = Status.FINISHED
    del third
    gc.collect()
    advance(runner, second)
    assert list(runner._texts) == [second]


@pytest.mark.parametrize("family", ["rwkv"])
def test_engine_without_a_plan_equals_generate(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(family)
    prompts = [tiny_ids(1, n, seed=n)[0].tolist() for n in (11, 5)]
    model.generation_config.pad_token_id = 0
    report = torch_armllm.patch(model, progress=False)
    assert not report.captured
    with caplog.at_level("WARNING"):
        engine = engine_of(model, swap_space=1 << 20, speculative_config={"method": "ngram"})
    assert "has no plan" in caplog.text
    one = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    two = SamplingParams(temperature=0.9, seed=1, n=2, max_tokens=NEW, ignore_eos=True)
    (greedy,), drawn = generate_token_ids(engine, prompts, [one, two])
    model.generation_config.eos_token_id = None
    assert greedy == generated(model, prompts[0])
    alone = engine_of(model)
    assert generate_token_ids(alone, prompts[1:], two) == [drawn]
    assert engine.scheduler.blocks.usage == 0
