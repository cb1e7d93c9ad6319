"""The fused head: the same bits as the separate head, and the most probable tokens that may be sampled."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_armllm
from tests.support.engines import generate_token_ids, make_engine, plan_runner
from torch_armllm import Recipe
from torch_armllm.engine.execution.plan_runner import PlanRunner
from torch_armllm.engine.request import Request, Sequence
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.scheduling.step import Scheduled, Step
from torch_armllm.model_survey.tiny_models import tiny_ids, tiny_model
from torch_armllm.ops import variants
from torch_armllm.ops.sample import best_tokens
from torch_armllm.plan.step import StepResult

GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)


@functools.cache
def patched(head: str | None, dtype: torch.dtype) -> Any:
    model = tiny_model("llama", dtype)
    report = torch_armllm.patch(model, Recipe(head=head), progress=False)
    assert report.captured, report.capture_reason
    return model


def prompts(count: int) -> list[list[int]]:
    return [tiny_ids(1, 11 + number, seed=number)[0].tolist() for number in range(count)]


def decoding(runner: PlanRunner, count: int) -> Step:
    """Returns a step that computes one more token of each sequence."""
    step = Step(decode_only=True)
    for number, prompt in enumerate(prompts(count)):
        (sequence,) = Request(str(number), prompt, SamplingParams(), seed=0).sequences
        sequence.blocks = [number]
        runner.execute(Step([Scheduled(sequence, 0, len(prompt) - 1)]))
        step.scheduled.append(Scheduled(sequence, len(prompt) - 1, 1))
    return step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head", ["int8", "g32", None])
@pytest.mark.parametrize("count", [1, 5])
def test_fused_head_equals_separate_head_bitwise(head: str | None, dtype: torch.dtype, count: int) -> None:
    model = patched(head, dtype)
    drawable = model.config.vocab_size - 30
    runner = plan_runner(model, 8, drawable=drawable)
    step = decoding(runner, count)
    alone = runner.execute(step)
    assert runner.compute(step, best=True).best is None  # the first such step fuses the head
    fused = runner.compute(step, best=True)
    assert torch.equal(fused.logits, alone) and fused.logits.dtype == alone.dtype
    assert fused.best is not None
    assert fused.best.tolist() == best_tokens(alone[:, :drawable]).tolist()
    assert runner.compute(step).best is None


@pytest.mark.parametrize(
    ("family", "setting", "scheme", "dtype"),
    [
        ("granite", {"logits_scaling": 6.0}, "int8", torch.bfloat16),
        ("cohere", {"logit_scale": 0.13}, "int6", torch.float32),
    ],
    ids=["divided", "multiplied"],
)
def test_scaled_logits_are_fused_with_the_bits_of_the_model(
    family: str, setting: dict[str, float], scheme: str, dtype: torch.dtype
) -> None:
    model = tiny_model(family, dtype, **setting)
    assert torch_armllm.patch(model, Recipe(head=scheme), progress=False).captured
    runner = plan_runner(model, 8)
    step = decoding(runner, 3)
    hidden = torch.randn(4, model.config.hidden_size, dtype=dtype)
    head: Any = runner.executor.layers.head
    assert torch.equal(head(hidden), head._by_model(hidden))
    alone = runner.execute(step)
    runner.compute(step, best=True)
    fused = runner.compute(step, best=True)
    assert fused.best is not None
    assert torch.equal(fused.logits, alone)
    assert fused.best.tolist() == best_tokens(alone).tolist()


def long_sequences(size: int) -> list[Sequence]:
    """Returns sequences that outgrow a split of split-KV attention after a few more tokens."""
    made = []
    for number, length in enumerate((250, 41)):
        prompt = tiny_ids(1, length, seed=number)[0].tolist()
        (sequence,) = Request(str(number), prompt, SamplingParams(), seed=0).sequences
        sequence.blocks = list(range(number * 512 // size, (number + 1) * 512 // size))
        made.append(sequence)
    return made


def decode_growing(
    runner: PlanRunner, compute: Callable[[Step], StepResult]
) -> list[tuple[Tensor, list[int]]]:
    """Decodes `long_sequences`; returns copies of the logits and most probable tokens of each step."""
    sequences, found = long_sequences(runner.block_size), []
    for sequence in sequences:
        runner.execute(Step([Scheduled(sequence, 0, len(sequence.token_ids))]))
    for number in range(14):
        step = Step(decode_only=True)
        for sequence in sequences:
            sequence.token_ids.append((7 * number + len(sequence.token_ids)) % 90)
            step.scheduled.append(Scheduled(sequence, len(sequence.token_ids) - 1, 1))
        logits, best, _ = compute(step)
        found.append((logits.clone(), best_tokens(logits).tolist() if best is None else best.tolist()))
    return found


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_replayed_steps_equal_separate_steps_bitwise(family: str) -> None:
    model = tiny_model(family)
    assert torch_armllm.patch(model, "int4", progress=False).captured
    runner = plan_runner(model, 1024 // 16)
    expected = decode_growing(runner, lambda step: StepResult(runner.execute(step)))
    bindings = []

    def fused(step: Step) -> StepResult:
        computed = runner.compute(step, best=True)
        fused = runner.executor.layers.fused_head
        bindings.append(0 if fused is None else fused._binding)
        return computed

    found = decode_growing(runner, fused)
    assert [best for _, best in found] == [best for _, best in expected]
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(found, expected, strict=True))
    none, first, *_, last = bindings  # the first step fused the head
    assert none == 0 < first < last and len(set(bindings)) == 3  # a new binding after a split's end


def test_interleaved_steps_do_not_change_results() -> None:
    model = patched("int8", torch.float32)
    runner, other = plan_runner(model, 8), plan_runner(model, 8)
    step, another = decoding(runner, 3), decoding(other, 2)
    expected, other_expected = runner.execute(step), other.execute(another)
    for each, given in ((runner, step), (other, another)):
        each.compute(given, best=True)
    for _ in range(3):
        assert torch.equal(runner.compute(step, best=True).logits, expected)
        assert torch.equal(runner.compute(step, best=True).logits, expected)
        assert torch.equal(other.compute(another, best=True).logits, other_expected)
        assert torch.equal(runner.execute(step), expected)


def test_changed_thread_count_does_not_change_results() -> None:
    runner = plan_runner(patched("int8", torch.float32), 8)
    step, before = decoding(runner, 3), torch.get_num_threads()
    expected = runner.execute(step)
    try:
        for threads in (1, 1, 2, 1, 3):
            torch.set_num_threads(threads)
            for _ in range(2):
                assert torch.equal(runner.compute(step, best=True).logits, expected)
    finally:
        torch.set_num_threads(before)


def test_variant_may_change_between_steps() -> None:
    runner = plan_runner(patched("int8", torch.float32), 8)
    step = decoding(runner, 3)
    for name in variants.machine().runnable:
        with variants.use(name):
            expected = runner.execute(step)
        runner.compute(step, best=True)  # by the default kernels
        with variants.use(name):
            for _ in range(2):
                assert torch.equal(runner.compute(step, best=True).logits, expected)


def test_timed_step_equals_untimed_step_bitwise() -> None:
    runner = plan_runner(patched("int8", torch.float32), 8)
    step = decoding(runner, 3)
    for _ in range(2):  # the first step fuses the head
        expected = runner.compute(step, best=True).logits.clone()
    fused = runner.executor.layers.fused_head
    assert fused is not None and fused._inputs is not None
    computed, times = fused.run_timed(fused._inputs)
    assert torch.equal(computed.logits, expected)
    assert times is not None and (times[:, 0] > 0).all()
    first, last = times[-2:].tolist()
    assert last[1] - first[1] == times[:-2, [0, 2]].sum() + first[0] + last[0]
    runner.plan.run(fused._inputs)
    computed, times = fused.run_timed(fused._inputs)
    assert torch.equal(computed.logits, expected) and times is None


def test_replay_checks_token_ids() -> None:
    runner = plan_runner(patched("int8", torch.float32), 8)
    step = decoding(runner, 2)
    for _ in range(3):
        expected = runner.compute(step, best=True).logits.clone()
    token_ids = step.scheduled[1].sequence.token_ids
    right, token_ids[-1] = token_ids[-1], 1 << 30
    with pytest.raises(RuntimeError, match=f"token 1 has id {1 << 30}, but the vocabulary is 0 to"):
        runner.compute(step, best=True)
    token_ids[-1] = right
    assert torch.equal(runner.compute(step, best=True).logits, expected)


@pytest.mark.parametrize("sizes", [{}, {"hidden_size": 32, "embedding_size": 64}])
def test_head_with_more_ops_is_not_fused(sizes: dict[str, int]) -> None:
    """Gemma 2 caps its logits; Electra maps hidden states to the size of its embeddings first."""
    model = tiny_model("electra" if sizes else "gemma2", **sizes)
    assert torch_armllm.patch(model, progress=False).captured
    runner = plan_runner(model, 8)
    step = decoding(runner, 2)
    expected = runner.execute(step)
    for _ in range(3):
        computed = runner.compute(step, best=True)
        assert computed.best is None and torch.equal(computed.logits, expected)


def test_prefill_steps_are_not_fused() -> None:
    runner = plan_runner(patched("int8", torch.float32), 8)
    step = decoding(runner, 2)
    runner.compute(step, best=True)
    (sequence,) = Request("prompt", prompts(1)[0], SamplingParams(), seed=0).sequences
    sequence.blocks = [5]
    mixed = Step([*step.scheduled, Scheduled(sequence, 0, len(sequence.token_ids))])
    assert runner.compute(mixed, best=True).best is None
    assert runner.compute(step, best=True).best is not None


def test_greedy_outputs_equal_those_sampled_from_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    fused = generate_token_ids(engine, prompts(4), GREEDY)
    assert engine.runner.executor.layers.fused_head is not None  # type: ignore[attr-defined]
    by_logits = make_engine()
    without = by_logits.runner.begin
    monkeypatch.setattr(by_logits.runner, "begin", lambda step, best=False: without(step, False))
    assert generate_token_ids(by_logits, prompts(4), GREEDY) == fused


def test_other_sampling_parameters_use_logits() -> None:
    others = [
        SamplingParams(temperature=0.9, seed=3, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=0.0, logprobs=2, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=0.0, repetition_penalty=1.5, max_tokens=9, ignore_eos=True),
    ]
    alone = [
        generate_token_ids(make_engine(), [prompt], params)[0]
        for prompt, params in zip(prompts(3), others, strict=True)
    ]
    engine = make_engine()
    first = generate_token_ids(
        engine, prompts(4), GREEDY
    )  # fuses the head, so that the next steps return best tokens
    together = generate_token_ids(engine, [*prompts(3), prompts(4)[3]], [*others, GREEDY])
    assert together == [*alone, first[3]]


def test_nan_row_ends_its_sequence_only(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    expected = generate_token_ids(engine, prompts(2), GREEDY)
    begin, finish = engine.runner.begin, engine.runner.finish
    steps: list[Step] = []

    def begin_noted(step: Step, best: bool = False) -> None:
        steps.append(step)
        begin(step, best)

    def finish_with_nan() -> StepResult:
        computed = finish()
        rows = [s.sequence.request.request_id for s in steps[-1].scheduled]
        if computed.best is not None and rows == ["0", "1"]:
            computed.logits[0] = torch.nan
            computed.best[0] = -1
        return computed

    monkeypatch.setattr(engine.runner, "begin", begin_noted)
    monkeypatch.setattr(engine.runner, "finish", finish_with_nan)
    with pytest.warns(UserWarning, match="hold no number; its sequence ends"):
        assert generate_token_ids(engine, prompts(2), GREEDY)[1] == expected[1]


def test_take_greedy_rejects_rows_without_a_token() -> None:
    engine = make_engine()
    generate_token_ids(engine, prompts(1), GREEDY)
    sampler = engine.sampler
    request = Request("one", prompts(1)[0], GREEDY, seed=0)
    sequences: list[Sequence] = list(request.sequences)
    assert sampler.take_greedy(array("q", [7]), sequences) == [7]
    assert sampler.take_greedy(array("q", [-1]), sequences) is None
