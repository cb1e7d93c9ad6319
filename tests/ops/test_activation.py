"""Gated activations, and with them the kernels' exp and tanh, against references on every variant."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from torch_armllm.ops import activation, variants

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
RUNNABLE = variants.machine().distinct("activation")

EXACT_FUNCTIONS = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: x / 2 * torch.special.erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x: x / (1 + torch.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: x.clamp(min=0),
}


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("kind", sorted(EXACT_FUNCTIONS))
def test_float32_error_is_bounded(kind: str) -> None:
    x = torch.cat((torch.linspace(-12, 12, 4001), torch.linspace(-1e-3, 1e-3, 501)))
    exact = EXACT_FUNCTIONS[kind](x.double())
    for name in RUNNABLE:
        with variants.use(name):
            actual = activation.gated_act(x, torch.ones_like(x), kind).double()
        error = (actual - exact).abs()
        assert error.max() < 2e-6
        # In the far tail the rounding of exp's argument makes the relative error larger.
        assert (error / exact.abs().clamp(min=1e-30))[x.abs() < 6].max() < 3e-6


EXTREME_VALUES = (math.nan, math.inf, 3e38, 200.0, 90.0, 0.0, -0.0, 1e-42, -90.0, -200.0, -3e38)


@pytest.mark.parametrize("kind", sorted(EXACT_FUNCTIONS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_gates_match_exact_values(kind: str, dtype: torch.dtype) -> None:
    gate = torch.tensor(EXTREME_VALUES).to(dtype)
    exact = (EXACT_FUNCTIONS[kind](gate.double()) / 2).to(dtype)
    for name in RUNNABLE:
        with variants.use(name):
            assert_close(activation.gated_act(gate, torch.full_like(gate, 0.5), kind), exact)


def test_extreme_gates_are_clamped() -> None:
    gate = torch.tensor(EXTREME_VALUES)
    for name in RUNNABLE:
        with variants.use(name):
            actual = activation.gated_act(gate, gate, "swiglu_clamped")
            assert actual[0].isnan()
            assert_close(actual[1:5], torch.full((4,), 56 / (1 + math.exp(-7 * 1.702))))
            assert_close(actual[5:], torch.zeros(6))


@pytest.mark.parametrize("dtype", FLOATS)
def test_results_are_rounded_to_nearest_even(dtype: torch.dtype) -> None:
    """relu(x) · y is exact in float32, and halfway between two values of ``dtype`` for some y: ties show."""
    torch.manual_seed(0)
    gate = torch.cat((torch.rand(2000) * 2, torch.logspace(-44, 38, 999), torch.zeros(1))).to(dtype)
    up = (1 + torch.randint(0, 256, gate.shape) / 128).to(dtype)
    expected = (gate.double() * up.double()).float().to(dtype)
    for name in RUNNABLE:
        with variants.use(name):
            assert torch.equal(activation.gated_act(gate, up, "relu"), expected)
