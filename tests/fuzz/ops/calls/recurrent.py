"""Random calls of ops of recurrent layers, whose states are in slots of sequences."""

from __future__ import annotations

from random import Random

import torch

from tests.fuzz.ops.arguments import Call, Spec
from tests.fuzz.ops.calls.draws import WIDTHS, Makers, any_float, maybe

STATES = (torch.float32, torch.bfloat16)
"""Dtypes of the states that sum over all tokens."""


def states_of(draw: Random) -> tuple[Call, int, int]:
    """Returns slots, starts and lengths of a few sequences, their tokens, and the number of slots."""
    starts, lengths = [0], []
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        starts.append(starts[-1] + draw.choice((0, 1, 1, 1, 2, 5, 40, 90)))
        lengths.append(starts[-1] - starts[-2] + draw.choice((0, 0, 1, 7)))
    count = len(lengths)
    slots = count + draw.choice((0, 0, 1, 3))
    order = draw.sample(range(slots), slots)
    call: Call = {
        "save_slots": maybe(draw, saved_states(draw, starts[-1], order[count:])),
        "state_slots": Spec((count,), torch.int64, order[:count]),
        "query_start": Spec((count + 1,), torch.int32, starts),
        "seq_lens": Spec((count,), torch.int32, lengths),
    }
    return call, starts[-1], slots


def saved_states(draw: Random, tokens: int, free: list[int]) -> Spec:
    """Returns slots for the states after some tokens; often none."""
    if draw.random() < 0.3:
        return Spec((0,), torch.int64, [])
    saves = [-1] * tokens
    for token, slot in zip(draw.sample(range(tokens), min(tokens, len(free))), free, strict=False):
        saves[token] = slot
    return Spec((tokens,), torch.int64, saves)


def _causal_conv(draw: Random) -> Call:
    call, tokens, slots = states_of(draw)
    channels, taps, dtype = draw.choice((*WIDTHS, 520)), draw.choice((1, 2, 3, 4, 4, 8)), any_float(draw)
    return call | {
        "x": Spec((tokens, channels), dtype),
        "weight": Spec((taps, channels), torch.float32),
        "bias": maybe(draw, Spec((channels,), torch.float32)),
        "state": Spec((slots, taps - 1, channels), dtype),
        "silu": draw.random() < 0.5,
    }


def _gated_delta_rule(draw: Random) -> Call:
    call, tokens, slots = states_of(draw)
    key_heads, repeats, dtype = draw.choice((1, 2, 3)), draw.choice((1, 2, 4)), any_float(draw)
    key_size, value_size = draw.choice((1, 2, 7, 16, 64, 128)), draw.choice((1, 15, 16, 17, 33, 64))
    heads = key_heads * repeats
    gates = (heads,) if draw.random() < 0.5 else (heads, key_size)
    return call | {
        "q": Spec((tokens, key_heads, key_size), dtype),
        "k": Spec((tokens, key_heads, key_size), dtype),
        "v": Spec((tokens, heads, value_size), dtype if draw.random() < 0.7 else any_float(draw)),
        "gate": Spec((tokens, *gates), any_float(draw)),
        "beta": Spec((tokens, heads), any_float(draw), "unit"),
        "state": Spec((slots, heads, key_size, value_size), draw.choice(STATES)),
        "scale": draw.choice((0.125, 1.0)),
        "normalize": draw.random() < 0.7,
        "delta": draw.random() < 0.7,
    }


def _selective_scan(draw: Random) -> Call:
    call, tokens, slots = states_of(draw)
    channels, states = draw.choice((1, 15, 16, 17, 40, 130)), draw.choice((1, 2, 7, 16, 33, 256))
    factors = lambda: maybe(draw, Spec((tokens, states), any_float(draw)))  # noqa: E731
    return call | {
        "x": Spec((tokens, channels), any_float(draw)),
        "dt": Spec((tokens, channels), any_float(draw)),
        "a": Spec((states, channels), torch.float32),
        "b": factors(),
        "c": factors(),
        "state": Spec((slots, states, channels), draw.choice(STATES)),
        "normalize": draw.random() < 0.3,
    }


RECURRENT: Makers = {
    "causal_conv": _causal_conv,
    "gated_delta_rule": _gated_delta_rule,
    "selective_scan": _selective_scan,
}
