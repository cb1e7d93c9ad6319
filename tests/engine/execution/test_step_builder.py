"""Decode-only steps: reused buffers hold the same values as the inputs of a step that is built anew."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from torch_armllm.engine.execution.step_builder import StepBuilder
from torch_armllm.engine.request import Request, Sequence
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.step import Scheduled, Step
from torch_armllm.kv_cache.shapes import Cache
from torch_armllm.ops.attention import new_kv_cache
from torch_armllm.plan.step import StepInputs

SIZE = 16


def cache() -> Cache:
    return new_kv_cache(1, 1, SIZE, 16, 16, torch.float32)


def sequence(random: Random, length: int) -> Sequence:
    """Returns a sequence with all tokens but the last computed, and its blocks in random order."""
    prompt = [random.randrange(1000) for _ in range(length)]
    (made,) = Request("r", prompt, SamplingParams(), seed=0).sequences
    made.token_ids.append(random.randrange(1000))
    made.computed = length
    make_room(random, made)
    return made


def make_room(random: Random, made: Sequence) -> None:
    while len(made.blocks) * SIZE < len(made.token_ids):
        made.blocks.append(random.randrange(1 << 20))


def decoding(sequences: list[Sequence]) -> Step:
    return Step([Scheduled(one, one.computed, 1) for one in sequences], decode_only=True)


def tensors(inputs: StepInputs) -> list[Tensor]:
    fields = (inputs.input_ids, inputs.position_ids, inputs.slots, inputs.query_start, inputs.seq_lens)
    return [field.clone() for field in fields]


def blocks(inputs: StepInputs, sequences: list[Sequence]) -> list[list[int]]:
    return [row[: len(one.blocks)] for row, one in zip(inputs.block_table.tolist(), sequences, strict=True)]


@pytest.mark.parametrize("seed", range(5))
def test_reused_buffers_equal_new_inputs(seed: int) -> None:
    random = Random(seed)
    builder = StepBuilder(cache(), SIZE, first_position=3)
    running = [sequence(random, random.randrange(1, 70)) for _ in range(3)]
    for _ in range(300):
        for one in running:
            one.token_ids.append(random.randrange(1000))
            one.computed += 1
            make_room(random, one)
        event = random.random()
        if event < 0.05 or not running:
            running.insert(random.randrange(len(running) + 1), sequence(random, random.randrange(1, 2000)))
        elif event < 0.1:
            del running[random.randrange(len(running))]
        elif event < 0.15:  # preempted, and resumed with other blocks
            one = running[random.randrange(len(running))]
            one.blocks = []
            make_room(random, one)
        elif event < 0.2:  # a step that also prefills a prompt
            reading = sequence(random, random.randrange(1, 700))
            builder.build(Step([*decoding(running).scheduled, Scheduled(reading, 0, reading.computed)]))
        if not running:
            continue
        step = decoding(running)
        over = builder.decode(step)
        found, rows = tensors(over), blocks(over, running)
        anew, wanted = StepBuilder(cache(), SIZE, first_position=3).build(step)
        assert wanted == list(range(len(running)))
        assert all(torch.equal(a, b) for a, b in zip(found, tensors(anew), strict=True))
        assert rows == blocks(anew, running) == [one.blocks for one in running]
        assert over.max_seq_len == anew.max_seq_len == max(one.computed + 1 for one in running)


def test_equal_sequence_counts_reuse_tensors() -> None:
    random = Random(0)
    builder = StepBuilder(cache(), SIZE)
    one, other = sequence(random, 5), sequence(random, 9)
    first = builder.decode(decoding([one]))
    assert builder.decode(decoding([other])) is first
    both = builder.decode(decoding([one, other]))
    assert both is not first and both.tokens == 2
    assert builder.decode(decoding([one])) is first


def test_longer_block_table_creates_new_tensors() -> None:
    random = Random(0)
    builder = StepBuilder(cache(), SIZE)
    first = builder.decode(decoding([sequence(random, 5)]))
    long = sequence(random, 100 * SIZE)
    second = builder.decode(decoding([long]))
    assert second is not first
    assert blocks(second, [long]) == [long.blocks]
