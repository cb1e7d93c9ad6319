"""The selective scan against its reference, on every variant."""

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
    scan_inputs,
)
from torch_armllm.ops import recurrent, variants


@settings(max_examples=60, deadline=None)
@given(
    steps=STEPS,
    channels=st.sampled_from((1, 15, 16, 17, 40, 130)),
    states=st.sampled_from((1, 2, 3, 15, 16, 33, 256)),
    ones=st.booleans(),
    normalize=st.booleans(),
    saved=st.booleans(),
    dtype=st.sampled_from(FLOATS),
    wide=st.booleans(),
    stored=st.sampled_from(STORED),
)
def test_matches_reference(
    steps: Steps,
    channels: int,
    states: int,
    ones: bool,
    normalize: bool,
    saved: bool,
    dtype: torch.dtype,
    wide: bool,
    stored: torch.dtype,
) -> None:
    torch.manual_seed(channels + states)
    x, *factors = scan_inputs(steps.tokens, channels, states, dtype, ones)
    assert x is not None
    x = x.float() if wide else x
    before = torch.randn(SLOTS, states, channels).to(stored)
    state = before.clone()
    rest = (*steps.metadata, normalize, steps.saves(states) if saved else None)
    expected = recurrent.reference_selective_scan(x, *factors, state, *rest)  # type: ignore[arg-type]
    results, after = [], []
    for name in RUNNABLE:
        with variants.use(name):
            after.append(before.clone())
            results.append(recurrent.selective_scan(x, *factors, after[-1], *rest))  # type: ignore[arg-type]
        assert torch.equal(results[-1], results[0])
        assert torch.equal(after[-1], after[0])
    # a sum of 256 states of size 1 is up to 16 times as large as its terms
    scale = math.sqrt(states)
    assert_close(results[0] / scale, expected / scale, torch.float32 if wide else dtype, stored)
    assert_close(after[0], state, torch.float32, stored)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("argument", [0, 1, 3, 4], ids=["x", "dt", "b", "c"])
def test_values_that_are_not_finite_stay_in_their_sequence(
    value: float, argument: int, stored: torch.dtype
) -> None:
    torch.manual_seed(0)
    steps = Steps([4, 4], [0, 0])
    inputs = scan_inputs(8, 20, 3, torch.float32)
    inputs[argument][1] = value  # type: ignore[index]
    expected = recurrent.reference_selective_scan(
        *inputs,
        torch.zeros(SLOTS, 3, 20, dtype=stored),
        *steps.metadata,  # type: ignore[arg-type]
    )
    for name in RUNNABLE:
        with variants.use(name):
            state = torch.full((SLOTS, 3, 20), math.nan, dtype=stored)  # a new sequence does not read it
            out = recurrent.selective_scan(*inputs, state, *steps.metadata)  # type: ignore[arg-type]
            assert out[0].isfinite().all() and out[4:].isfinite().all()
            assert_close(out, expected, torch.float32, stored)


def test_equals_the_function_of_transformers() -> None:
    from transformers.models.mamba import modeling_mamba as mamba

    torch.manual_seed(0)
    tokens, steps = 50, Steps([50], [0])
    x, dt, a, b, c = scan_inputs(tokens, 20, 16, torch.float32)
    assert x is not None and dt is not None and a is not None and b is not None and c is not None
    expected, final = mamba.mamba_selective_scan(
        *(part.T[None] for part in (x, dt)), a.T, *(part.T[None] for part in (b, c)), return_last_state=True
    )
    state = torch.full((SLOTS, 16, 20), math.nan)
    assert_close(
        recurrent.selective_scan(x * dt, dt, a, b, c, state, *steps.metadata), expected[0].T, torch.float32
    )
    assert_close(state[2], final[0].T, torch.float32)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x", torch.zeros(3), "x must have the shape"),
        ("dt", torch.zeros(3, 5), r"dt must have the shape of x, \(3, 6\), not \(3, 5\)"),
        ("a", torch.zeros(4, 5), r"a must be float32 of shape \(states, 6\)"),
        ("a", torch.zeros(257, 6), "1 to 256 states"),
        ("a", torch.zeros(4, 6, dtype=torch.bfloat16), "a must be float32"),
        ("b", torch.zeros(3, 5), r"b must have the shape \(3, 4\), not \(3, 5\)"),
        ("c", torch.zeros(2, 4), r"c must have the shape \(3, 4\), not \(2, 4\)"),
        ("state", torch.zeros(SLOTS, 6, 4), r"bfloat16 of shape \(slots, 4, 6\), not of shape \(7, 6, 4\)"),
        ("state", torch.zeros(SLOTS, 4, 6).half(), "contiguous float32 or bfloat16 of shape"),
        ("state", torch.zeros(2, 4, 6), "names slot 2 for sequence 0, but the state has 2 slots"),
    ],
)
def test_invalid_arguments_raise(name: str, value: Tensor, message: str) -> None:
    slots, query_start, seq_lens = Steps([2, 1], [0, 1]).metadata
    x, dt, a, b, c = scan_inputs(3, 6, 4, torch.float32)
    call = dict(x=x, dt=dt, a=a, b=b, c=c, state=torch.zeros(SLOTS, 4, 6))
    call |= dict(state_slots=slots, query_start=query_start, seq_lens=seq_lens)
    recurrent.selective_scan(**call)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=message):
        recurrent.selective_scan(**(call | {name: value}))  # type: ignore[arg-type]
