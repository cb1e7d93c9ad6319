"""Random steps and inputs of the recurrent ops."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_armllm.ops import variants

STORED = (torch.float32, torch.bfloat16)
"""Dtypes of states."""
RUNNABLE = variants.machine().distinct("recurrent")
SLOTS = 7


@dataclass
class Steps:
    """New tokens and earlier tokens of each sequence, and their slots."""

    new: list[int]
    before: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.new)

    @property
    def metadata(self) -> tuple[Tensor, Tensor, Tensor]:
        starts = [0]
        for count in self.new:
            starts.append(starts[-1] + count)
        lengths = [new + before for new, before in zip(self.new, self.before, strict=True)]
        slots = [(3 * number + 2) % SLOTS for number in range(len(self.new))]
        return (
            torch.tensor(slots, dtype=torch.int64),
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(lengths, dtype=torch.int32),
        )


def assert_close(
    actual: Tensor, expected: Tensor, dtype: torch.dtype, stored: torch.dtype = torch.float32
) -> None:
    """Compares results of an op with its reference's, up to the rounding of results and of states."""
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    if stored == torch.bfloat16:  # a sum near a tie is rounded to either side, as sums differ in their order
        tolerance = 2e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def delta_inputs(
    tokens: int,
    key_heads: int,
    repeats: int,
    key_size: int,
    value_size: int,
    per_channel: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Returns q, k, v, gate and beta, where keys have lengths around 1, so that states stay bounded."""
    heads = key_heads * repeats
    q, k = (torch.randn(tokens, key_heads, key_size) / math.sqrt(key_size) for _ in range(2))
    v = torch.randn(tokens, heads, value_size)
    gate = -torch.rand(tokens, heads, *([key_size] if per_channel else []))
    return q.to(dtype), k.to(dtype), v.to(dtype), gate, torch.rand(tokens, heads).to(dtype)


def scan_inputs(
    tokens: int, channels: int, states: int, dtype: torch.dtype, ones: bool = False
) -> tuple[Tensor | None, ...]:
    """Returns x, dt, a, b and c, where every factor of a state is below 1."""
    x, dt = torch.randn(tokens, channels).to(dtype), (torch.rand(tokens, channels) + 0.05).to(dtype)
    b, c = (None if ones else torch.randn(tokens, states).to(dtype) for _ in range(2))
    return x, dt, -torch.rand(states, channels) - 0.1, b, c
