"""The recurrent ops against their references, on every variant."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_armllm.ops import recurrent, variants

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
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

    def saves(self, seed: int) -> Tensor:
        """Returns slots for the states after some tokens: all slots that no sequence has."""
        found = torch.full((self.tokens,), -1, dtype=torch.int64)
        used = self.metadata[0].tolist()
        free = [slot for slot in range(SLOTS) if slot not in used][: self.tokens]
        order = torch.randperm(self.tokens, generator=torch.Generator().manual_seed(seed))
        found[order[: len(free)]] = torch.tensor(free, dtype=torch.int64)
        return found


STEPS = st.lists(
    st.tuples(st.sampled_from((0, 1, 1, 2, 5, 33, 70)), st.sampled_from((0, 0, 1, 9))), max_size=5
).map(lambda rows: Steps([new for new, _ in rows], [before for _, before in rows]))


def assert_close(
    actual: Tensor, expected: Tensor, dtype: torch.dtype, stored: torch.dtype = torch.float32
) -> None:
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
def test_convolution_matches_reference(
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
def test_delta_rule_matches_reference(
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


def scan_inputs(
    tokens: int, channels: int, states: int, dtype: torch.dtype, ones: bool = False
) -> tuple[Tensor | None, ...]:
    """Returns x, dt, a, b and c, where every factor of a state is below 1."""
    x, dt = torch.randn(tokens, channels).to(dtype), (torch.rand(tokens, channels) + 0.05).to(dtype)
    b, c = (None if ones else torch.randn(tokens, states).to(dtype) for _ in range(2))
    return x, dt, -torch.rand(states, channels) - 0.1, b, c


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
def test_selective_scan_matches_reference(
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
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("cut", [1, 5, 16, 33, 39])
def test_bits_do_not_depend_on_chunks_and_batches(cut: int, per_channel: bool, stored: torch.dtype) -> None:
    torch.manual_seed(cut)
    tokens, others = 40, 21
    inputs = delta_inputs(tokens + others, 2, 2, 24, 40, per_channel, torch.bfloat16)
    x, weight = torch.randn(tokens + others, 70).to(torch.bfloat16), torch.randn(4, 70)
    scanned, dt, a, b, c = scan_inputs(tokens + others, 70, 9, torch.bfloat16)

    def run(steps: Steps, rows: slice, states: list[Tensor]) -> tuple[Tensor, ...]:
        own = [part[rows] for part in inputs]
        of_scan = [part[rows] for part in (scanned, dt, b, c)]  # type: ignore[index]
        return (
            recurrent.gated_delta_rule(*own, states[0], *steps.metadata, 0.2, True),
            recurrent.causal_conv(x[rows], weight, None, states[1], *steps.metadata, True),
            recurrent.selective_scan(*of_scan[:2], a, *of_scan[2:], states[2], *steps.metadata),  # type: ignore[arg-type]
        )

    for name in RUNNABLE:
        with variants.use(name):
            states = [
                [
                    torch.randn(SLOTS, 4, 24, 40).to(stored),
                    torch.randn(SLOTS, 3, 70).to(torch.bfloat16),
                    torch.randn(SLOTS, 9, 70).to(stored),
                ]
                for _ in range(2)
            ]
            together = run(Steps([tokens, others], [0, 0]), slice(0, None), states[0])
            first = run(Steps([cut], [0]), slice(0, cut), states[1])
            last = run(Steps([tokens - cut], [cut]), slice(cut, tokens), states[1])
            slot = int(Steps([1], [0]).metadata[0])
            for whole, *parts in zip(together, first, last, strict=True):
                assert torch.equal(whole[:tokens], torch.cat(parts))
            for one, other in zip(*states, strict=True):
                assert torch.equal(one[slot], other[slot])


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


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("argument", [0, 1, 3, 4], ids=["x", "dt", "b", "c"])
def test_scan_keeps_values_that_are_not_finite_in_their_sequence(
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


def test_scan_reads_strided_tokens_in_place() -> None:
    torch.manual_seed(0)
    steps = Steps([5, 1], [0, 3])
    merged = torch.randn(6, 20 + 20 + 3 + 3 + 1).to(torch.bfloat16)
    x, dt, b, c, _ = merged.split((20, 20, 3, 3, 1), 1)
    a = -torch.rand(20, 3).T
    states = [torch.randn(SLOTS, 3, 20)] * 2
    states = [state.clone() for state in states]
    strided = recurrent.selective_scan(x, dt, a, b, c, states[0], *steps.metadata)
    x, dt, a, b, c = (part.contiguous() for part in (x, dt, a, b, c))
    assert torch.equal(strided, recurrent.selective_scan(x, dt, a, b, c, states[1], *steps.metadata))
    assert torch.equal(*states)


def test_strided_tokens_are_read_in_place() -> None:
    torch.manual_seed(0)
    steps = Steps([5, 1], [0, 3])
    merged = torch.randn(6, 2 * 16 + 2 * 16 + 4 * 24 + 9).to(torch.bfloat16)
    q, k, v = (
        part.unflatten(1, (-1, size))
        for part, size in zip(merged[:, :-9].split((32, 32, 96), 1), (16, 16, 24), strict=True)
    )
    gate, beta = -torch.rand(6, 4, 2)[..., 0], merged[:, 3:7].sigmoid()
    states = [torch.randn(SLOTS, 4, 16, 24)] * 2
    states = [state.clone() for state in states]
    strided = recurrent.gated_delta_rule(q, k, v, gate, beta, states[0], *steps.metadata, 1.0, True)
    dense = [part.contiguous() for part in (q, k, v, gate, beta)]
    assert torch.equal(strided, recurrent.gated_delta_rule(*dense, states[1], *steps.metadata, 1.0, True))
    assert torch.equal(*states)


def test_equals_the_functions_of_transformers() -> None:
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

    x, weight, bias = torch.randn(tokens, 70), torch.randn(70, 4), torch.randn(70)
    expected = qwen.causal_conv1d_fn(x.t()[None], weight, bias, "silu")[0].t()
    state = torch.full((SLOTS, 3, 70), math.nan)
    assert_close(
        recurrent.causal_conv(x, weight.t(), bias, state, *steps.metadata, True), expected, torch.float32
    )
    assert torch.equal(state[2], x[-3:])


def test_scan_equals_the_function_of_transformers() -> None:
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
def test_invalid_arguments_of_convolutions_raise(name: str, value: Tensor, message: str) -> None:
    slots, query_start, seq_lens = Steps([2, 1], [0, 1]).metadata
    call = dict(x=torch.zeros(3, 6), weight=torch.zeros(4, 6), bias=None, state=torch.zeros(SLOTS, 3, 6))
    call |= dict(state_slots=slots, query_start=query_start, seq_lens=seq_lens)
    recurrent.causal_conv(**call)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=message):
        recurrent.causal_conv(**(call | {name: value}))  # type: ignore[arg-type]


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
def test_invalid_arguments_of_scans_raise(name: str, value: Tensor, message: str) -> None:
    slots, query_start, seq_lens = Steps([2, 1], [0, 1]).metadata
    x, dt, a, b, c = scan_inputs(3, 6, 4, torch.float32)
    call = dict(x=x, dt=dt, a=a, b=b, c=c, state=torch.zeros(SLOTS, 4, 6))
    call |= dict(state_slots=slots, query_start=query_start, seq_lens=seq_lens)
    recurrent.selective_scan(**call)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=message):
        recurrent.selective_scan(**(call | {name: value}))  # type: ignore[arg-type]


def test_opcheck() -> None:
    steps = Steps([2, 1], [0, 1])
    inputs = delta_inputs(3, 2, 2, 8, 8, True, torch.bfloat16)
    saves = {"save_slots": torch.tensor([-1, 4, 0])}
    for stored in STORED:
        arguments = (*inputs, torch.zeros(SLOTS, 4, 8, 8, dtype=stored), *steps.metadata, 1.0, True)
        torch.library.opcheck(torch.ops.armllm.gated_delta_rule.default, arguments, saves)
    conv = (torch.randn(3, 6), torch.randn(4, 6), None, torch.zeros(SLOTS, 3, 6), *steps.metadata)
    torch.library.opcheck(torch.ops.armllm.causal_conv.default, conv, saves)
    for ones, stored in ((False, torch.float32), (True, torch.float32), (False, torch.bfloat16)):
        state = torch.zeros(SLOTS, 4, 6, dtype=stored)
        scan = (*scan_inputs(3, 6, 4, torch.bfloat16, ones), state, *steps.metadata)
        torch.library.opcheck(torch.ops.armllm.selective_scan.default, scan, saves)
