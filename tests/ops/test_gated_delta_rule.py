"""The gated delta rule against its reference, on every variant."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.recurrent_inputs import (
    FLOATS,
    RUNNABLE,
    SLOTS,
    STEPS,
    STORED,
    Steps,
    assert_close,
    delta_inputs,
)
from torch_armllm.ops import recurrent, variants


@settings(max_examples=60, deadline=None)
@given(
    steps=STEPS,
    key_heads=st.integers(1, 3),
    repeats=st.sampled_from((1, 2, 3)),
    key_size=st.sampled_from((1, 3, 16, 64)),
    value_size=st.sampled_from((1, 16, 31, 32, 70)),
    per_channel=st.booleans(),
    normalize=st.booleans(),
    delta=st.booleans(),
    saved=st.booleans(),
    dtype=st.sampled_from(FLOATS),
    wide=st.booleans(),
    stored=st.sampled_from(STORED),
)
def test_matches_reference(
    steps: Steps,
    key_heads: int,
    repeats: int,
    key_size: int,
    value_size: int,
    per_channel: bool,
    normalize: bool,
    delta: bool,
    saved: bool,
    dtype: torch.dtype,
    wide: bool,
    stored: torch.dtype,
) -> None:
    torch.manual_seed(key_size + value_size)
    q, k, v, *gates = delta_inputs(steps.tokens, key_heads, repeats, key_size, value_size, per_channel, dtype)
    inputs = q, k, v.float() if wide else v, *gates
    before = torch.randn(SLOTS, key_heads * repeats, key_size, value_size).to(stored)
    rest = (*steps.metadata, 0.5, normalize, delta, steps.saves(key_size) if saved else None)
    state = before.clone()
    expected = recurrent.reference_gated_delta_rule(*inputs, state, *rest)
    results, states = [], []
    for name in RUNNABLE:
        with variants.use(name):
            states.append(before.clone())
            results.append(recurrent.gated_delta_rule(*inputs, states[-1], *rest))
        assert torch.equal(results[-1], results[0])
        assert torch.equal(states[-1], states[0])
    assert_close(results[0], expected, torch.float32 if wide else dtype, stored)
    assert_close(states[0], state, torch.float32, stored)


def test_slots_of_other_sequences_stay_as_they_are() -> None:
    torch.manual_seed(0)
    steps = Steps([3, 0, 2], [0, 4, 1])
    used = [int(slot) for slot, new in zip(steps.metadata[0], steps.new, strict=True) if new]
    others = [slot for slot in range(SLOTS) if slot not in used]
    before = torch.randn(SLOTS, 2, 8, 20)
    state = before.clone()
    recurrent.gated_delta_rule(
        *delta_inputs(5, 2, 1, 8, 20, False, torch.float32), state, *steps.metadata, 1.0
    )
    assert torch.equal(state[others], before[others])
    assert not torch.equal(state[used], before[used])


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_stay_in_their_sequence(value: float, stored: torch.dtype) -> None:
    torch.manual_seed(0)
    steps = Steps([4, 4], [0, 0])
    q, k, v, gate, beta = delta_inputs(8, 1, 1, 16, 32, False, torch.float32)
    gate[1] = value
    for name in RUNNABLE:
        with variants.use(name):
            state = torch.full((SLOTS, 1, 16, 32), math.nan, dtype=stored)  # a new sequence does not read it
            out = recurrent.gated_delta_rule(q, k, v, gate, beta, state, *steps.metadata, 1.0)
            expected = recurrent.reference_gated_delta_rule(
                q, k, v, gate, beta, torch.zeros_like(state), *steps.metadata, 1.0
            )
            assert out[0].isfinite().all() and out[4:].isfinite().all()
            assert_close(out, expected, torch.float32, stored)


def test_equals_the_function_of_transformers() -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    torch.manual_seed(0)
    tokens, steps = 90, Steps([90], [0])
    q, k, v, gate, beta = delta_inputs(tokens, 2, 2, 24, 40, False, torch.float32)
    expected, final = qwen.torch_chunk_gated_delta_rule(
        *(part[None] for part in (q, k, v, gate, beta)),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    state = torch.full((SLOTS, 4, 24, 40), math.nan)
    out = recurrent.gated_delta_rule(q, k, v, gate, beta, state, *steps.metadata, 24**-0.5, True)
    assert_close(out, expected[0], torch.float32)
    assert_close(state[2], final[0], torch.float32)


def _delta_call(**replaced: Tensor) -> None:
    steps = Steps([2, 1], [5, 1])
    slots, query_start, seq_lens = steps.metadata
    q, k, v, gate, beta = delta_inputs(3, 2, 2, 8, 8, False, torch.float32)
    call = dict(q=q, k=k, v=v, gate=gate, beta=beta, state=torch.zeros(SLOTS, 4, 8, 8))
    call |= dict(state_slots=slots, query_start=query_start, seq_lens=seq_lens)
    recurrent.gated_delta_rule(**(call | replaced), scale=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("q", torch.zeros(3, 16), "q, k and v must have the shape"),
        ("q", torch.zeros(3, 2, 4), "q and k must have the same shape"),
        ("v", torch.zeros(3, 3, 8), "the heads of v, 3, must be a multiple of those of k, 2"),
        ("v", torch.zeros(2, 4, 8), "v has 2 tokens, and q has 3"),
        ("k", torch.zeros(3, 2, 8, dtype=torch.bfloat16), "q and k must have one dtype"),
        ("gate", torch.zeros(3, 4, 7), r"gate must have the shape \(3, 4\) or \(3, 4, 8\), not \(3, 4, 7\)"),
        ("beta", torch.zeros(3, 2), r"beta must have the shape \(3, 4\)"),
        (
            "state",
            torch.zeros(SLOTS, 4, 8, 9),
            r"contiguous float32 or bfloat16 of shape \(slots, 4, 8, 8\)",
        ),
        ("state", torch.zeros(SLOTS, 4, 8, 8).half(), "contiguous float32 or bfloat16 of shape"),
        ("state", torch.zeros(2, 4, 8, 8), "names slot 2 for sequence 0, but the state has 2 slots"),
        ("state_slots", torch.tensor([0, -1]), "names slot -1 for sequence 1"),
        ("state_slots", torch.tensor([4, 4]), "state_slots names slot 4 for two sequences"),
        ("state_slots", torch.tensor([4]), r"query_start must be int32 of shape \(2\)"),
        ("save_slots", torch.tensor([-1, 7, -1]), "save_slots names slot 7 for token 1, but the state has 7"),
        ("save_slots", torch.tensor([-2, -1, -1]), "save_slots names slot -2 for token 0"),
        (
            "save_slots",
            torch.tensor([5, -1, -1]),
            "save_slots names slot 5, which a sequence or another token",
        ),
        (
            "save_slots",
            torch.tensor([0, -1, 0]),
            "save_slots names slot 0, which a sequence or another token",
        ),
        ("save_slots", torch.tensor([0, 1]), r"int64, empty or of shape \(3\), not of shape \(2\)"),
        ("save_slots", torch.zeros(3, dtype=torch.int32), "save_slots must be contiguous int64"),
        ("query_start", torch.tensor([0, 2, 4], dtype=torch.int32), "query_start must run from 0 to"),
        ("query_start", torch.tensor([0, 4, 3], dtype=torch.int32), "query_start must not decrease"),
        (
            "seq_lens",
            torch.tensor([1, 2], dtype=torch.int32),
            "has 2 new tokens, but seq_lens says 1",
        ),
    ],
)
def test_invalid_arguments_raise(name: str, value: Tensor, message: str) -> None:
    _delta_call()
    with pytest.raises(RuntimeError, match=message):
        _delta_call(**{name: value})
