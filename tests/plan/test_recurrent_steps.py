"""Steps of plans with recurrent layers: states and slots that do not fit are refused by name."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import torch_armllm
from torch_armllm.kv_cache.block_pool import BlockPool
from torch_armllm.kv_cache.sequence_blocks import SequenceBlocks
from torch_armllm.model_survey.tiny_models import tiny_ids, tiny_model
from torch_armllm.patching.state import patched_forward
from torch_armllm.plan.native import NativePlan
from torch_armllm.plan.step import StepInputs


@functools.cache
def forward() -> Any:
    model = tiny_model("qwen3_5_text")
    torch_armllm.patch(model, progress=False)
    found = patched_forward(model)
    assert found is not None and isinstance(found.plan, NativePlan)
    return found


def inputs_of(*counts: int) -> StepInputs:
    pool = BlockPool(forward().shape)
    sequences = [SequenceBlocks(pool) for _ in counts]
    ids = tiny_ids(1, sum(counts))
    positions = torch.cat([torch.arange(n) for n in (0, *counts)])[None]
    return StepInputs.pack(pool, sequences, list(counts), ids, positions)


def damage(inputs: StepInputs, kind: str) -> None:
    assert inputs.state_slots is not None
    if kind == "past the end":
        inputs.state_slots[1] = 2
    elif kind == "negative":
        inputs.state_slots[1] = -1
    elif kind == "twice":
        inputs.state_slots[1] = inputs.state_slots[0]
    elif kind == "missing":
        inputs.state_slots = inputs.state_slots[:1]
    elif kind == "narrow":
        inputs.state_slots = inputs.state_slots.int()
    elif kind.startswith("saves"):
        saves = {"saves past the end": [-1, 2], "saves its own": [-1, 1], "saves too few": [-1]}[kind]
        inputs.save_slots = torch.tensor((saves + [-1] * 7)[: 6 if kind == "saves too few" else 7])
    elif kind == "other sizes":
        inputs.states = [state[..., :-1].contiguous() for state in inputs.states]
    elif kind == "other dtype":
        inputs.states = [state.bfloat16() for state in inputs.states]
    elif kind == "too long":
        inputs.seq_lens[0] = 1


MESSAGES = {
    "past the end": "state_slots names slot 2 for sequence 1, but the state has 2 slots",
    "negative": "state_slots names slot -1 for sequence 1",
    "twice": "state_slots names slot 0 for two sequences",
    "missing": "1 slots of states need as many lengths of sequences",
    "narrow": "the slots of states, must be contiguous int64",
    "saves past the end": "save_slots names slot 2 for token 1, but the state has 2 slots",
    "saves its own": "save_slots names slot 1, which a sequence or another token of the step has",
    "saves too few": r"save_slots must be contiguous int64, empty or of shape \(7\)",
    "other sizes": "is not what layer 0 of its recurrent layers needs",
    "other dtype": "is not what layer 0 of its recurrent layers needs",
    "too long": "sequence 0",
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_wrong_states_raise(kind: str) -> None:
    inputs = inputs_of(3, 4)
    forward().plan.run(inputs)
    before = [state.clone() for state in inputs.states]
    damage(inputs, kind)
    with pytest.raises(RuntimeError, match=MESSAGES[kind]):
        forward().plan.run(inputs)
    if not kind.startswith("other"):
        assert all(torch.equal(a, b) for a, b in zip(inputs.states, before, strict=True))


def test_empty_step_changes_no_state() -> None:
    inputs = inputs_of(3)
    forward().plan.run(inputs)
    before = [state.clone() for state in inputs.states]
    empty = inputs_of()
    empty.states = inputs.states
    assert forward().plan.run(empty).shape[0] == 0
    assert all(torch.equal(a, b) for a, b in zip(inputs.states, before, strict=True))


def test_saved_states_are_those_of_a_shorter_step() -> None:
    inputs = inputs_of(5, 4)
    states = [torch.zeros(s.shape[0], 5, *s.shape[2:], dtype=s.dtype) for s in inputs.states]
    inputs.states = states
    inputs.save_slots = torch.tensor([-1, -1, 4, -1, -1, 2, -1, -1, -1])
    expected = forward().plan.run(inputs).clone()
    shorter = inputs_of(3, 1)
    shorter.input_ids = torch.cat((inputs.input_ids[:, :3], inputs.input_ids[:, 5:6]), 1)
    forward().plan.run(shorter)
    for state, ended in zip(states, shorter.states, strict=True):
        assert torch.equal(state[:, [4, 2]], ended[:, [0, 1]])
        assert not state[:, 3].any()
    inputs.save_slots = torch.empty(0, dtype=torch.int64)
    assert torch.equal(forward().plan.run(inputs), expected)


def test_slot_of_a_new_sequence_is_not_read() -> None:
    inputs = inputs_of(5)
    expected = forward().plan.run(inputs).clone()
    for state in inputs.states:
        state.fill_(float("nan"))
    assert torch.equal(forward().plan.run(inputs), expected)


def test_nan_stays_in_its_sequence() -> None:
    inputs = inputs_of(4, 4)
    expected = forward().plan.run(inputs).clone()
    later = inputs_of(4, 4)
    later.states, later.cache = inputs.states, inputs.cache
    later.seq_lens += 4
    later.slots += 4
    assert later.state_slots is not None
    for state in later.states:
        state[:, int(later.state_slots[0])] = float("nan")
    found = forward().plan.run(later)
    assert found[:4].isnan().any() and not found[4:].isnan().any()
    assert expected.isfinite().all()
