"""The causal convolution against its reference, on every variant."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.recurrent_inputs import FLOATS, RUNNABLE, SLOTS, STEPS, Steps, assert_close
from torch_armllm.ops import recurrent, variants


@settings(max_examples=60, deadline=None)
@given(
    steps=STEPS,
    channels=st.sampled_from((1, 15, 16, 40, 530)),
    taps=st.integers(1, 8),
    biased=st.booleans(),
    silu=st.booleans(),
    saved=st.booleans(),
    dtype=st.sampled_from(FLOATS),
)
def test_matches_reference(
    steps: Steps, channels: int, taps: int, biased: bool, silu: bool, saved: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(channels + taps)
    x, weight = torch.randn(steps.tokens, channels).to(dtype), torch.randn(taps, channels)
    bias = torch.randn(channels) if biased else None
    before = torch.randn(SLOTS, taps - 1, channels).to(dtype)
    state, saves = before.clone(), steps.saves(channels) if saved else None
    expected = recurrent.reference_causal_conv(x, weight, bias, state, *steps.metadata, silu, saves)
    results = []
    for name in RUNNABLE:
        with variants.use(name):
            own = before.clone()
            results.append(recurrent.causal_conv(x, weight, bias, own, *steps.metadata, silu, saves))
        assert torch.equal(own, state)
        assert torch.equal(results[-1], results[0])
    assert_close(results[0], expected, dtype)


def test_equals_the_function_of_transformers() -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    torch.manual_seed(0)
    tokens, steps = 90, Steps([90], [0])
    x, weight, bias = torch.randn(tokens, 70), torch.randn(70, 4), torch.randn(70)
    expected = qwen.causal_conv1d_fn(x.t()[None], weight, bias, "silu")[0].t()
    state = torch.full((SLOTS, 3, 70), math.nan)
    assert_close(
        recurrent.causal_conv(x, weight.t(), bias, state, *steps.metadata, True), expected, torch.float32
    )
    assert torch.equal(state[2], x[-3:])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x", torch.zeros(3), "x must have the shape"),
        ("weight", torch.zeros(9, 6), "1 to 8 taps"),
        ("weight", torch.zeros(4, 6, dtype=torch.bfloat16), "weight must be float32"),
        ("bias", torch.zeros(5), r"bias must be float32 of shape \(6\)"),
        ("state", torch.zeros(SLOTS, 4, 6), r"of shape \(slots, 3, 6\), not of shape \(7, 4, 6\)"),
        ("state", torch.zeros(SLOTS, 3, 6, dtype=torch.bfloat16), "of the dtype of x"),
    ],
)
def test_invalid_arguments_raise(name: str, value: Tensor, message: str) -> None:
    slots, query_start, seq_lens = Steps([2, 1], [0, 1]).metadata
    call = dict(x=torch.zeros(3, 6), weight=torch.zeros(4, 6), bias=None, state=torch.zeros(SLOTS, 3, 6))
    call |= dict(state_slots=slots, query_start=query_start, seq_lens=seq_lens)
    recurrent.causal_conv(**call)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=message):
        recurrent.causal_conv(**(call | {name: value}))  # type: ignore[arg-type]
