"""The causal convolution, the gated delta rule and the selective scan beside transformers, and with NaN."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.recurrent_inputs import (
    RUNNABLE,
    SLOTS,
    STORED,
    Steps,
    assert_close,
    delta_inputs,
    scan_inputs,
)
from torch_armllm.ops import recurrent, variants

VALUES = (math.nan, math.inf, -math.inf)


def test_convolution_equals_the_function_of_transformers() -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    tokens, steps = 90, Steps([90], [0])
    x, weight, bias = torch.randn(tokens, 70), torch.randn(70, 4), torch.randn(70)
    expected = qwen.causal_conv1d_fn(x.t()[None], weight, bias, "silu")[0].t()
    state = torch.full((SLOTS, 3, 70), math.nan)
    found = recurrent.causal_conv(x, weight.t(), bias, state, *steps.metadata, True)
    assert_close(found, expected, torch.float32)
    assert torch.equal(state[2], x[-3:])


def test_delta_rule_equals_the_function_of_transformers() -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

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


def test_scan_equals_the_function_of_transformers() -> None:
    from transformers.models.mamba import modeling_mamba as mamba

    tokens, steps = 50, Steps([50], [0])
    x, dt, a, b, c = scan_inputs(tokens, 20, 16, torch.float32)
    assert x is not None and dt is not None and a is not None and b is not None and c is not None
    expected, final = mamba.mamba_selective_scan(
        *(part.T[None] for part in (x, dt)), a.T, *(part.T[None] for part in (b, c)), return_last_state=True
    )
    state = torch.full((SLOTS, 16, 20), math.nan)
    found = recurrent.selective_scan(x * dt, dt, a, b, c, state, *steps.metadata)
    assert_close(found, expected[0].T, torch.float32)
    assert_close(state[2], final[0].T, torch.float32)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(
    ("op", "argument", "value"),
    [("gated_delta_rule", 3, value) for value in VALUES]
    + [("selective_scan", argument, value) for argument in (0, 1, 3, 4) for value in VALUES],
)
def test_values_that_are_not_finite_stay_in_their_sequence(
    op: str, argument: int, value: float, stored: torch.dtype
) -> None:
    """A new sequence does not read its state."""
    steps, scans = Steps([4, 4], [0, 0]), op == "selective_scan"
    inputs = (
        scan_inputs(8, 20, 3, torch.float32) if scans else delta_inputs(8, 1, 1, 3, 20, False, torch.float32)
    )
    inputs[argument][1] = value  # type: ignore[index]
    shape, rest = ((3, 20), ()) if scans else ((1, 3, 20), (1.0,))
    zeros = torch.zeros(SLOTS, *shape, dtype=stored)
    expected = getattr(recurrent, f"reference_{op}")(*inputs, zeros, *steps.metadata, *rest)
    for name in RUNNABLE:
        with variants.use(name):
            state = torch.full_like(zeros, math.nan)
            out = getattr(recurrent, op)(*inputs, state, *steps.metadata, *rest)
            assert out[0].isfinite().all() and out[4:].isfinite().all()
            assert_close(out, expected, torch.float32, stored)
