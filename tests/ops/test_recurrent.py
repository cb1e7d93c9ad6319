"""Chunks, batches, saved states and rounded states of the recurrent ops, on every variant."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.recurrent_inputs import RUNNABLE, SLOTS, STORED, Steps, delta_inputs, scan_inputs
from torch_armllm.ops import recurrent, variants


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("op", ["delta rule", "no delta", "per channel", "scan", "normalized scan"])
def test_bfloat16_states_are_rounded_after_every_token(op: str, before: int) -> None:
    torch.manual_seed(before)
    tokens, scans = 9, "scan" in op
    sizes = (5, 70) if scans else (4, 24, 40)
    inputs: tuple[Tensor | None, ...]
    if scans:
        inputs = scan_inputs(tokens, 70, 5, torch.float32)
    else:
        inputs = delta_inputs(tokens, 2, 2, 24, 40, op == "per channel", torch.float32)

    def run(state: Tensor, rows: slice, metadata: tuple[Tensor, ...]) -> Tensor:
        if scans:
            x, dt, a, b, c = (part if number == 2 else part[rows] for number, part in enumerate(inputs))  # type: ignore[index]
            return recurrent.selective_scan(x, dt, a, b, c, state, *metadata, op == "normalized scan")  # type: ignore[arg-type]
        own = [part[rows] for part in inputs]  # type: ignore[index]
        return recurrent.gated_delta_rule(*own, state, *metadata, 0.2, True, op != "no delta")

    for name in RUNNABLE:
        with variants.use(name):
            rounded = torch.randn(SLOTS, *sizes).bfloat16()
            by_token = rounded.clone()
            together = run(rounded, slice(0, tokens), Steps([tokens], [before]).metadata)
            for t in range(tokens):
                exact = by_token.float()
                out = run(exact, slice(t, t + 1), Steps([1], [before + t]).metadata)
                by_token = exact.bfloat16()
                assert torch.equal(out[0], together[t])
            assert torch.equal(rounded, by_token)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("before", [0, 3])
def test_saved_states_have_the_bits_of_sequences_that_end_there(
    before: int, delta: bool, stored: torch.dtype
) -> None:
    torch.manual_seed(before)
    inputs = delta_inputs(12, 2, 2, 24, 40, True, torch.bfloat16)
    x, weight = torch.randn(12, 70).to(torch.bfloat16), torch.randn(4, 70)
    a, c = -torch.rand(9, 70), torch.randn(12, 9)
    at, slots = (0, 1, 6, 11), (1, 3, 0, 6)
    saves = torch.full((12,), -1)
    saves[list(at)] = torch.tensor(slots)
    for name in RUNNABLE:
        with variants.use(name):
            first = torch.randn(SLOTS, 4, 24, 40).to(stored)
            conv_first = torch.randn(SLOTS, 3, 70).to(torch.bfloat16)
            own, conv_own = first.clone(), conv_first.clone()
            scan_first = torch.randn(SLOTS, 9, 70).to(stored)
            scan_own = scan_first.clone()
            metadata = Steps([12], [before]).metadata
            recurrent.gated_delta_rule(*inputs, own, *metadata, 0.2, True, delta, saves)
            recurrent.causal_conv(x, weight, None, conv_own, *metadata, True, saves)
            recurrent.selective_scan(x, x.abs(), a, None, c, scan_own, *metadata, True, saves)
            for token, slot in zip(at, slots, strict=True):
                short = Steps([token + 1], [before]).metadata
                ended, conv_ended, scan_ended = first.clone(), conv_first.clone(), scan_first.clone()
                part = [tensor[: token + 1] for tensor in inputs]
                recurrent.gated_delta_rule(*part, ended, *short, 0.2, True, delta)
                recurrent.causal_conv(x[: token + 1], weight, None, conv_ended, *short, True)
                x_part, c_part = x[: token + 1], c[: token + 1]
                recurrent.selective_scan(x_part, x_part.abs(), a, None, c_part, scan_ended, *short, True)
                assert torch.equal(own[slot], ended[2])
                assert torch.equal(conv_own[slot], conv_ended[2])
                assert torch.equal(scan_own[slot], scan_ended[2])
            assert torch.equal(own[[4, 5]], first[[4, 5]]) and torch.equal(
                conv_own[[4, 5]], conv_first[[4, 5]]
            )
