"""Recurrent ops with the sizes of Qwen3.5-35B-A3B's layers: 16 key and 32 value heads of 128.

The selective scan has those of Jamba's layers: 8192 channels with 16 states.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bench.micro.call import Call, over
from torch_armllm.ops import recurrent

KEY_HEADS, HEADS, SIZE, TAPS = 16, 32, 128, 4
CHANNELS, STATES = 8192, 16
STORED = (torch.float32, torch.bfloat16)
STEPS = {"decode 1": (1, 1), "decode 16": (16, 1), "prompt of 512": (1, 512), "8 prompts of 64": (8, 64)}
"""Sequences, and tokens of each."""


def _metadata(step: str) -> tuple[Tensor, Tensor, Tensor]:
    sequences, tokens = STEPS[step]
    starts = torch.arange(sequences + 1, dtype=torch.int32) * tokens
    return torch.arange(sequences), starts, torch.full((sequences,), tokens + 1, dtype=torch.int32)


@over(step=STEPS, stored=STORED, per_channel=(False, True))
def gated_delta_rule(step: str, stored: torch.dtype, per_channel: bool) -> Call:
    sequences, tokens = STEPS[step]
    total = sequences * tokens
    q, k = torch.randn(2, total, KEY_HEADS, SIZE).bfloat16()
    v, beta = torch.randn(total, HEADS, SIZE).bfloat16(), torch.rand(total, HEADS).bfloat16()
    gate = -torch.rand(total, HEADS, *([SIZE] if per_channel else []))
    state, metadata = torch.zeros(sequences, HEADS, SIZE, SIZE, dtype=stored), _metadata(step)
    return Call(
        lambda: recurrent.gated_delta_rule(q, k, v, gate, beta, state, *metadata, SIZE**-0.5, True),
        read=2 * state.nbytes if tokens == 1 else 0,
        operations=0 if tokens == 1 else 7 * total * HEADS * SIZE * SIZE,
    )


@over(step=STEPS, stored=STORED)
def selective_scan(step: str, stored: torch.dtype) -> Call:
    sequences, tokens = STEPS[step]
    total = sequences * tokens
    x, dt = torch.randn(total, CHANNELS).bfloat16(), torch.rand(total, CHANNELS)
    b, c = torch.randn(2, total, STATES).bfloat16()
    a, state = -torch.rand(STATES, CHANNELS), torch.zeros(sequences, STATES, CHANNELS, dtype=stored)
    metadata = _metadata(step)
    return Call(
        lambda: recurrent.selective_scan(x, dt, a, b, c, state, *metadata),
        read=2 * state.nbytes if tokens == 1 else 0,
        operations=0 if tokens == 1 else 6 * total * CHANNELS * STATES,  # and an exponential for each six
    )


@over(step=STEPS)
def causal_conv(step: str) -> Call:
    sequences, tokens = STEPS[step]
    channels = (2 * KEY_HEADS + HEADS) * SIZE
    x, weight = torch.randn(sequences * tokens, channels).bfloat16(), torch.randn(TAPS, channels)
    state, metadata = torch.zeros(sequences, TAPS - 1, channels, dtype=torch.bfloat16), _metadata(step)
    return Call(
        lambda: recurrent.causal_conv(x, weight, None, state, *metadata, True),
        read=2 * (x.nbytes + state.nbytes),
    )
