"""Decode-only steps: reused buffers hold the same values as the inputs of a step that is built anew."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from torch_armllm.engine.execution.step_builder import StepBuilder
from torch_armllm.engine.execution.step_feature import StepFeatures
from torch_armllm.engine.execution.step_states import StepStates
from torch_armllm.engine.request import Request, Sequence
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.scheduling.step import Scheduled, Step
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


@pytest.mark.parametrize("seed", range(3))
def test_reused_buffers_hold_the_saves_of_their_step_only(seed: int) -> None:
    random = Random(seed)
    states = [torch.zeros(2, 9, 3)]
    builder = StepBuilder(cache(), SIZE, features=StepFeatures([StepStates(states)]))
    running = [sequence(random, 40 + number) for number in range(3)]
    for _ in range(100):
        for number, one in enumerate(running):
            one.state, one.saves = number, {}
            one.token_ids.append(random.randrange(1000))
            one.computed += 1
            make_room(random, one)
            if random.random() < 0.3:  # of this step, and one that waits for its copy
                one.saves = {one.computed + 1: 3 + number, one.computed: 6 + number}
        step = decoding(running)
        if random.random() < 0.3:
            step.scheduled[1] = Scheduled(running[1], 5, running[1].computed - 4)
            step.decode_only = False
        step.saves_states = any(one.saves for one in running)
        inputs, _ = builder.build(step) if not step.decode_only else (builder.decode(step), None)
        assert inputs.state_slots is not None and inputs.state_slots.tolist() == [0, 1, 2]
        expected: list[int] = []
        for scheduled in step.scheduled:
            own = [-1] * scheduled.count
            for length, slot in scheduled.sequence.saves.items():
                if length > scheduled.start:
                    own[length - scheduled.start - 1] = slot
            expected += own
        assert inputs.save_slots.tolist() == expected


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
