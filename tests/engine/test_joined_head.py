"""The head joined to the plan: the bits of the head alone, and the best of the tokens that may be drawn."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import torch_armllm
from tests.engine.engines import answer_ids, engine
from torch_armllm.coverage.tiny import tiny_ids, tiny_model
from torch_armllm.engine.joined_head import Computed
from torch_armllm.engine.request import Answer, Request
from torch_armllm.engine.runner import ModelRunner
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.step import Scheduled, Step
from torch_armllm.ops.sample import best_tokens

GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)


@functools.cache
def patched(head: str | None, dtype: torch.dtype) -> Any:
    model = tiny_model("llama", dtype)
    report = torch_armllm.patch(model, "int4", head=head, progress=False)
    assert report.captured, report.capture_reason
    return model


def prompts(count: int) -> list[list[int]]:
    return [tiny_ids(1, 11 + number, seed=number)[0].tolist() for number in range(count)]


def decoding(runner: ModelRunner, count: int) -> Step:
    """A step that gives each of some answers one more token."""
    step = Step()
    for number, prompt in enumerate(prompts(count)):
        (answer,) = Request(str(number), prompt, SamplingParams(), seed=0).answers
        answer.blocks = [number]
        runner.execute(Step([Scheduled(answer, 0, len(prompt) - 1)]))
        step.scheduled.append(Scheduled(answer, len(prompt) - 1, 1))
    return step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head", ["int8", "g32", None])
@pytest.mark.parametrize("count", [1, 5])
def test_joined_and_alone_give_the_same_bits(head: str | None, dtype: torch.dtype, count: int) -> None:
    model = patched(head, dtype)
    drawable = model.config.vocab_size - 30
    runner = ModelRunner(model, 8, drawable=drawable)
    step = decoding(runner, count)
    alone = runner.execute(step)
    assert runner.compute(step, best=True).best is None  # the first such step joins them
    joined = runner.compute(step, best=True)
    assert torch.equal(joined.logits, alone) and joined.logits.dtype == alone.dtype
    assert joined.best is not None
    assert joined.best.flatten().tolist() == best_tokens(alone[:, :drawable]).tolist()
    assert runner.compute(step).best is None


def test_a_head_that_does_more_stays_apart() -> None:
    model = tiny_model("gemma2")
    assert torch_armllm.patch(model, progress=False).captured
    runner = ModelRunner(model, 8)
    step = decoding(runner, 2)
    expected = runner.execute(step)
    for _ in range(3):
        computed = runner.compute(step, best=True)
        assert computed.best is None and torch.equal(computed.logits, expected)


def test_steps_that_read_prompts_do_not_join() -> None:
    runner = ModelRunner(patched("int8", torch.float32), 8)
    step = decoding(runner, 2)
    runner.compute(step, best=True)
    (answer,) = Request("prompt", prompts(1)[0], SamplingParams(), seed=0).answers
    answer.blocks = [5]
    mixed = Step([*step.scheduled, Scheduled(answer, 0, len(answer.token_ids))])
    assert runner.compute(mixed, best=True).best is None
    assert runner.compute(step, best=True).best is not None


def test_greedy_answers_are_those_drawn_by_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    on = engine()
    joined = answer_ids(on, prompts(4), GREEDY)
    assert on.runner._joined is not None  # type: ignore[attr-defined]
    by_logits = engine()
    without = by_logits.runner.compute
    monkeypatch.setattr(by_logits.runner, "compute", lambda step, best=False: without(step))
    assert answer_ids(by_logits, prompts(4), GREEDY) == joined


def test_those_who_want_more_than_the_best_token_are_drawn_for_by_logits() -> None:
    others = [
        SamplingParams(temperature=0.9, seed=3, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=0.0, logprobs=2, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=0.0, repetition_penalty=1.5, max_tokens=9, ignore_eos=True),
    ]
    alone = [
        answer_ids(engine(), [prompt], params)[0] for prompt, params in zip(prompts(3), others, strict=True)
    ]
    on = engine()
    first = answer_ids(on, prompts(4), GREEDY)  # so that the next steps come with best tokens
    together = answer_ids(on, [*prompts(3), prompts(4)[3]], [*others, GREEDY])
    assert together == [*alone, first[3]]


def test_a_row_without_a_number_ends_its_answer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    on = engine()
    expected = answer_ids(on, prompts(2), GREEDY)
    compute = on.runner.compute

    def spoilt(step: Step, best: bool = False) -> Computed:
        computed = compute(step, best)
        rows = [s.answer.request.request_id for s in step.scheduled]
        if computed.best is not None and rows == ["0", "1"]:
            computed.logits[0] = torch.nan
            computed.best[0] = -1
        return computed

    monkeypatch.setattr(on.runner, "compute", spoilt)
    with pytest.warns(UserWarning, match="hold no number: its answer ends"):
        assert answer_ids(on, prompts(2), GREEDY)[1] == expected[1]


def test_an_answer_is_drawn_for_once() -> None:
    on = engine()
    answer_ids(on, prompts(1), GREEDY)
    sampler = on.sampler
    request = Request("one", prompts(1)[0], GREEDY, seed=0)
    answers: list[Answer] = list(request.answers)
    drawn = sampler.take(torch.tensor([[7]]), answers)
    assert drawn is not None and [[d.token_id for d in found] for found in drawn.values()] == [[7]]
    assert sampler.take(torch.tensor([[7], [8]]), answers) is None
