"""The plan runner: packed steps compared with the model's own forward, block copies, and rows of logits."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_armllm
from tests.support.engines import plan_runner
from torch_armllm.engine.request import Request, Sequence
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.scheduling.step import Scheduled, Step
from torch_armllm.model_survey.tiny_models import tiny_ids, tiny_model

FAMILIES = ["llama", "qwen3_moe", "gemma2", "cohere", "deepseek_v3", "gemma4_text"]
LENGTHS = [41, 7, 90]


@functools.cache
def patched(family: str, quantize: str | None = "int4", dtype: torch.dtype = torch.float32) -> Any:
    model = tiny_model(family, dtype)
    report = torch_armllm.patch(model, quantize, progress=False)
    assert report.captured, report.capture_reason
    return model


def sequences(lengths: list[int], blocks: list[int], size: int, every_row: bool = True) -> list[Sequence]:
    """Returns sequences with random prompts; their blocks are taken from the end of a list."""
    params = SamplingParams(prompt_logprobs=0 if every_row else None)
    made = []
    for number, length in enumerate(lengths):
        request = Request(str(number), tiny_ids(1, length, seed=number)[0].tolist(), params, seed=0)
        (sequence,) = request.sequences
        sequence.blocks = [blocks.pop() for _ in range(-(-length // size))]
        made.append(sequence)
    return made


def alone(model: Any, sequence: Sequence) -> Tensor:
    """Returns the logits of all tokens of a sequence, by the model's own forward."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([sequence.token_ids])).logits[0]
    return logits


def shuffled(count: int) -> list[int]:
    blocks = list(range(count))
    random.Random(0).shuffle(blocks)
    return blocks


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_chunks_equal_single_sequences_bitwise(family: str) -> None:
    model = patched(family)
    runner = plan_runner(model, num_blocks=32)
    some = sequences(LENGTHS, shuffled(32), runner.block_size)
    expected = [alone(model, sequence) for sequence in some]
    done = [0] * len(some)
    draw = random.Random(1)
    while any(n < len(sequence.token_ids) for n, sequence in zip(done, some, strict=True)):
        step, parts = Step(), []
        for i, sequence in enumerate(some):
            left = len(sequence.token_ids) - done[i]
            count = min(left, draw.choice([0, 1, 1, 5, 37]))
            if count:
                step.scheduled.append(Scheduled(sequence, done[i], count))
                parts.append(expected[i][done[i] : done[i] + count])
                done[i] += count
        if parts:
            assert torch.equal(runner.execute(step), torch.cat(parts))


def test_only_requested_logits_are_computed() -> None:
    model = patched("llama")
    runner = plan_runner(model, num_blocks=16)
    first, second = sequences([40, 20], shuffled(16), runner.block_size, every_row=False)
    chunk = Step([Scheduled(first, 0, 33)])
    assert runner.execute(chunk).shape == (0, runner.vocab_size)
    both = runner.execute(Step([Scheduled(first, 33, 7), Scheduled(second, 0, 20)]))
    assert torch.equal(both, torch.stack([alone(model, sequence)[-1] for sequence in (first, second)]))


def test_draft_tokens_follow_the_known_tokens() -> None:
    model = patched("llama")
    runner = plan_runner(model, num_blocks=16)
    first, second = sequences([40, 30], shuffled(16), runner.block_size, every_row=False)
    first.draft, first.token_ids = first.token_ids[35:], first.token_ids[:35]
    got = runner.execute(Step([Scheduled(first, 0, 40), Scheduled(second, 0, 30)]))
    first.token_ids = first.token_ids + first.draft
    assert torch.equal(got, torch.cat([alone(model, first)[34:], alone(model, second)[-1:]]))
    first.token_ids, first.draft = first.token_ids[:39], first.token_ids[39:]
    assert torch.equal(runner.execute(Step([Scheduled(first, 38, 2)])), got[4:6])


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gemma4_text"])
def test_copied_and_swapped_blocks_keep_their_contents(family: str) -> None:
    model = patched(family)
    runner = plan_runner(model, num_blocks=12, swap_blocks=4)
    size = runner.block_size
    first, second = sequences([70, 45], shuffled(12), size)
    expected = alone(model, first)
    runner.execute(Step([Scheduled(first, 0, 69)]))
    before = first.blocks
    out = Step([Scheduled(second, 0, 40)], swaps_out=list(zip(before, [2, 0, 3], strict=True)))
    second.blocks = [before[1], before[0]]
    runner.execute(out)
    *first.blocks, spare = [b for b in range(12) if b not in before][:4]
    back = Step(
        [Scheduled(second, 40, 5), Scheduled(first, 69, 1)],
        swaps_in=list(zip([2, 0, 3], first.blocks, strict=True)),
    )
    got = runner.execute(back)
    assert torch.equal(got, torch.cat([alone(model, second)[40:], expected[69:]]))

    other = Sequence(first.request, 1, [*first.token_ids[:66], 11, 12], [*first.blocks[:2], spare])
    forked = Step([Scheduled(other, 66, 2)], copies=[(first.blocks[2], spare)])
    assert torch.equal(runner.execute(forked), alone(model, other)[66:])
    assert torch.equal(runner.execute(Step([Scheduled(first, 69, 1)])), expected[69:])


def test_block_table_grows_and_rows_are_reused() -> None:
    model = patched("llama")
    runner = plan_runner(model, num_blocks=400)
    some = sequences([3] * 70, shuffled(400), runner.block_size, every_row=False)
    expected = torch.stack([alone(model, sequence)[-1] for sequence in some])
    together = runner.execute(Step([Scheduled(sequence, 0, 3) for sequence in some]))
    assert torch.equal(together, expected)
    fewer = runner.execute(Step([Scheduled(sequence, 2, 1) for sequence in some[::-7]]))
    assert torch.equal(fewer, expected.flip(0)[::7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "cohere"])
def test_unquantized_rows_do_not_depend_on_the_batch(family: str, dtype: torch.dtype) -> None:
    model = patched(family, None, dtype)
    runner = plan_runner(model, num_blocks=16)
    some = sequences(LENGTHS, shuffled(16), runner.block_size, every_row=False)
    steps = [Scheduled(sequence, 0, len(sequence.token_ids)) for sequence in some]
    together = runner.execute(Step(steps))
    for row, scheduled in zip(together, steps, strict=True):
        assert torch.equal(runner.execute(Step([scheduled]))[0], row)
        torch.testing.assert_close(row, alone(model, scheduled.sequence)[-1], rtol=2e-2, atol=2e-2)


def test_ops_after_the_output_layer_are_detected() -> None:
    assert plan_runner(patched("llama"), 4).executor.layers.head.is_alone(torch.empty(1, 64))
    model = patched("gemma2")  # caps its logits
    assert not plan_runner(model, 4).executor.layers.head.is_alone(torch.empty(1, model.config.hidden_size))


def test_logits_that_the_model_widens_are_those_of_the_layer() -> None:
    model = patched("nemotron_h", dtype=torch.bfloat16)
    runner = plan_runner(model, 4, state_slots=1)
    hidden = torch.randn(3, model.config.hidden_size).bfloat16()
    head: Any = runner.executor.layers.head
    assert head.is_alone(hidden) and head.weights(hidden) is not None
    assert head(hidden).dtype == torch.bfloat16
    by_model = head._by_model(hidden)
    assert by_model.dtype == torch.float32
    assert torch.equal(head(hidden).float(), by_model)


def test_model_without_a_plan_raises() -> None:
    with pytest.raises(ValueError, match="is not patched"):
        plan_runner(tiny_model("llama"), 4)
