"""int4_moe against its reference, on every kernel variant, and against itself in other batches."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_armllm.ops import isa, linear, moe

VARIANTS = isa.machine().distinct("linear", "activation", "moe")
EXACT = linear.EXACT
FLOAT = tuple(name for name in linear.SCHEMES if name not in EXACT)


def packed(experts: int, rows: int, columns: int, scheme: str, random: torch.Generator) -> Tensor:
    """Random experts whose outputs are about as large as their inputs."""
    span, zero_points = linear.group_span(scheme), linear.has_zero_points(scheme)
    low, high = (-128, 128) if scheme == "i8" else (0, 16) if zero_points else (-8, 8)
    q = torch.randint(low, high, (experts, rows, columns), generator=random, dtype=torch.int8)
    shape = (experts, rows, -(-columns // span)) if span else (experts, rows)
    step = {"g32i": 1 / 40, "i8": 1 / 70}.get(scheme, 1 / 4.6) / columns**0.5
    scales = (0.5 + torch.rand(shape, generator=random)) * step
    if scheme == "i8":
        return linear.pack_int8(q, scales)
    multipliers = None
    if scheme == "g32i":
        groups = (experts, rows, -(-columns // 32))
        multipliers = torch.randint(1, 17, groups, generator=random, dtype=torch.uint8)
    zeros = torch.randint(6, 10, shape, generator=random, dtype=torch.uint8) if zero_points else None
    if linear.has_bf16_scales(scheme):
        scales = scales.bfloat16()
    return linear.pack_int4(q, multipliers, scales, scheme, zeros)


@dataclass
class Layer:
    """The experts of a layer and what the op needs to know of them."""

    gate_up: Tensor
    down: Tensor
    hidden: int
    intermediate: int
    scheme: str = "g32i"
    activation: str = "silu"
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gated: bool = True
    weigh_input: bool = False

    def options(self) -> dict[str, object]:
        return {
            "gate_up": self.gate_up,
            "down": self.down,
            "intermediate": self.intermediate,
            "scheme": self.scheme,
            "activation": self.activation,
            "gate_up_bias": self.gate_up_bias,
            "down_bias": self.down_bias,
            "gated": self.gated,
            "weigh_input": self.weigh_input,
        }

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return moe.int4_moe(x, ids, weights, **self.options())

    def reference(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return moe.reference_int4_moe(x, ids, weights, **self.options())


def make_layer(
    experts: int = 4,
    hidden: int = 64,
    intermediate: int = 48,
    scheme: str = "g32i",
    activation: str = "silu",
    bias: torch.dtype | None = None,
    seed: int = 0,
) -> Layer:
    random = torch.Generator().manual_seed(seed)
    gate = packed(experts, intermediate, hidden, scheme, random)
    up = packed(experts, intermediate, hidden, scheme, random)
    down = packed(experts, hidden, intermediate, scheme, random)
    layer = Layer(linear.interleave_panels(gate, up), down, hidden, intermediate, scheme, activation)
    if bias is not None:
        layer.gate_up_bias = torch.randn(experts, 2, intermediate, generator=random).to(bias)
        layer.down_bias = torch.randn(experts, hidden, generator=random).to(bias)
    return layer


def make_input(
    layer: Layer, tokens: int, top_k: int, dtype: torch.dtype = torch.float32, seed: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    experts = layer.gate_up.shape[0]
    x = torch.randn(tokens, layer.hidden, generator=random).to(dtype)
    ids = torch.rand(tokens, experts, generator=random).argsort(-1)[:, :top_k].contiguous()
    weights = torch.rand(tokens, top_k, generator=random) + 0.1
    return x, ids, weights / weights.sum(-1, keepdim=True)


def on_every_variant(layer: Layer, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The result, which all variants must agree on to the bit."""
    results = []
    for name in VARIANTS:
        with isa.use(name):
            results.append(layer(x, ids, weights))
    for name, result in zip(VARIANTS, results, strict=True):
        torch.testing.assert_close(result, results[0], rtol=0, atol=0, equal_nan=True, msg=f"{name} differs")
    return results[0]


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    top = expected.float().abs().max().clamp(min=1e-6)
    error = (found.float() - expected.float()).abs().max() / top
    assert error <= tolerance, f"differs by {error:.2e} of the largest value"


@pytest.mark.parametrize("scheme", EXACT)
@pytest.mark.parametrize("bias", [None, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_exact_schemes_equal_the_reference(scheme: str, bias: torch.dtype | None, tokens: int) -> None:
    # relu needs no polynomial, so only float32 rounding of the weighted sum is left.
    layer = make_layer(scheme=scheme, activation="relu", bias=bias)
    inputs = make_input(layer, tokens, 2)
    assert_close(on_every_variant(layer, *inputs), layer.reference(*inputs), 1e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swiglu_clamped", "silu_clamped"])
def test_activations(activation: str) -> None:
    layer = make_layer(activation=activation, bias=torch.float32)
    inputs = make_input(layer, 20, 2)
    assert_close(on_every_variant(layer, *inputs), layer.reference(*inputs), 1e-2)


@pytest.mark.parametrize("activation", ["swiglu_clamped", "silu_clamped"])
def test_clamp_limit(activation: str) -> None:
    layer = make_layer(activation=activation)
    x, ids, weights = make_input(layer, 6, 2)
    options = layer.options() | {"limit": 0.5}
    found = moe.int4_moe(4 * x, ids, weights, **options)
    assert_close(found, moe.reference_int4_moe(4 * x, ids, weights, **options), 1e-2)
    assert not torch.allclose(found, layer(4 * x, ids, weights))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 60])
@pytest.mark.parametrize("intermediate", [16, 72, 280])
def test_experts_without_a_gate(tokens: int, intermediate: int, bias: bool) -> None:
    random = torch.Generator().manual_seed(0)
    up = packed(4, intermediate, 64, "g32i", random)
    down = packed(4, 64, intermediate, "g32i", random)
    layer = Layer(up, down, 64, intermediate, activation="relu", gated=False)
    if bias:
        layer.gate_up_bias = torch.randn(4, intermediate, generator=random)
        layer.down_bias = torch.randn(4, 64, generator=random)
    inputs = make_input(layer, tokens, 2)
    found = on_every_variant(layer, *inputs)
    assert_close(found, layer.reference(*inputs), 1e-6)
    twice = Layer(linear.interleave_panels(up, up), down, 64, intermediate, activation="relu")
    if bias:
        twice.gate_up_bias = torch.stack([layer.gate_up_bias, layer.gate_up_bias], 1)
        twice.down_bias = layer.down_bias
    assert torch.equal(twice(*inputs), found)


@pytest.mark.parametrize("tokens", [1, 5, 60])
def test_weights_of_what_goes_in(tokens: int) -> None:
    layer = make_layer(bias=torch.float32, activation="relu")
    layer.weigh_input = True
    x, ids, weights = make_input(layer, tokens, 2)
    found = on_every_variant(layer, x, ids, weights)
    assert_close(found, layer.reference(x, ids, weights), 1e-6)
    first, second = (
        Layer(layer.gate_up, layer.down, 64, 48, "g32i", "relu", layer.gate_up_bias, layer.down_bias)(
            x * weights[:, j : j + 1], ids[:, j : j + 1], torch.ones(tokens, 1)
        )
        for j in (0, 1)
    )
    assert_close(found, first + second, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32])
def test_dtypes(dtype: torch.dtype, ids_dtype: torch.dtype) -> None:
    layer = make_layer()
    x, ids, weights = make_input(layer, 5, 2, dtype)
    found = on_every_variant(layer, x, ids.to(ids_dtype), weights.to(dtype))
    assert found.dtype == dtype
    assert_close(found, layer.reference(x, ids, weights.to(dtype)), 1e-2)


@pytest.mark.parametrize("scheme", FLOAT)
def test_float_group_scales(scheme: str) -> None:
    """Their scales are folded where an expert has many rows, so they are held to a tolerance only."""
    layer = make_layer(scheme=scheme, hidden=150, intermediate=72, bias=torch.bfloat16)
    for tokens in (2, 40):
        inputs = make_input(layer, tokens, 2)
        for name in VARIANTS:
            with isa.use(name):
                assert_close(layer(*inputs), layer.reference(*inputs), 4e-2)


@settings(max_examples=15, deadline=None)
@given(
    experts=st.integers(1, 9),
    hidden=st.integers(1, 100),
    intermediate=st.integers(1, 70),
    tokens=st.integers(0, 30),
    top_k=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_any_shape(experts: int, hidden: int, intermediate: int, tokens: int, top_k: int, seed: int) -> None:
    layer = make_layer(experts, hidden, intermediate, activation="relu", seed=seed)
    inputs = make_input(layer, tokens, min(top_k, experts), seed=seed)
    found = on_every_variant(layer, *inputs)
    assert found.shape == inputs[0].shape
    if tokens:
        assert_close(found, layer.reference(*inputs), 1e-6)


@pytest.mark.parametrize("tokens", [2, 9, 70])
def test_a_token_has_the_same_bits_alone_and_in_a_batch(tokens: int) -> None:
    layer = make_layer(hidden=80, intermediate=40, bias=torch.float32)
    x, ids, weights = make_input(layer, tokens, 3, torch.bfloat16)
    for name in VARIANTS:
        with isa.use(name):
            together = layer(x, ids, weights)
            for t in range(0, tokens, 7):
                alone = layer(x[t : t + 1], ids[t : t + 1], weights[t : t + 1])
                assert torch.equal(together[t : t + 1], alone), (name, t)


@pytest.mark.parametrize("tokens", [1, 12, 50])
def test_threads_do_not_change_bits(tokens: int) -> None:
    layer = make_layer(hidden=160, intermediate=96)
    x, ids, weights = make_input(layer, tokens, 2)
    ids[:, 0] = 3  # one crowded expert, whose tiles become narrow
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 24):
            torch.set_num_threads(threads)
            results.append(layer(x, ids, weights))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("tokens", [1, 8, 9, 300])
def test_all_tokens_on_one_expert(tokens: int) -> None:
    layer = make_layer(experts=6, activation="relu")
    x, _, _ = make_input(layer, tokens, 1)
    ids, weights = torch.full((tokens, 1), 4), torch.ones(tokens, 1)
    found = on_every_variant(layer, x, ids, weights)
    assert_close(found[-5:], layer.reference(x[-5:], ids[-5:], weights[-5:]), 1e-6)


@pytest.mark.parametrize("tokens", [1, 2, 20])
def test_an_expert_named_twice_counts_twice(tokens: int) -> None:
    layer = make_layer()
    x, ids, _ = make_input(layer, tokens, 1)
    twelve = layer(x, ids.expand(tokens, 12), torch.full((tokens, 12), 0.25))
    assert_close(twelve, layer(x, ids, torch.full((tokens, 1), 3.0)), 1e-6)


@pytest.mark.parametrize("tokens", [1, 30])
def test_every_expert_chosen(tokens: int) -> None:
    layer = make_layer(experts=5, activation="relu")
    inputs = make_input(layer, tokens, 5)
    assert_close(on_every_variant(layer, *inputs), layer.reference(*inputs), 1e-6)


@pytest.mark.parametrize("expert", [-1, 4, 2**31 - 1, 2**32, 2**40, -(2**63)])
def test_ids_out_of_range(expert: int) -> None:
    layer = make_layer()
    x, ids, weights = make_input(layer, 12, 3)
    ids[7, 1] = expert
    message = f"names expert {expert} as choice 1 of token 7, but gate_up holds experts 0 to 3"
    with pytest.raises(RuntimeError, match=message):
        layer(x, ids, weights)
    if -(2**31) <= expert < 2**31:
        with pytest.raises(RuntimeError, match=message):
            layer(x, ids.to(torch.int32), weights)


def test_many_rows_go_through_down_in_passes() -> None:
    layer = make_layer(experts=3, hidden=790, intermediate=32, activation="relu", bias=torch.float32)
    x, ids, weights = make_input(layer, 700, 2)
    found = on_every_variant(layer, x, ids, weights)
    for t in (0, 350, 699):
        alone = layer(x[t : t + 1], ids[t : t + 1], weights[t : t + 1])
        assert torch.equal(found[t : t + 1], alone)
    assert_close(found[-3:], layer.reference(x[-3:], ids[-3:], weights[-3:]), 1e-6)


def test_no_tokens() -> None:
    layer = make_layer()
    x, ids, weights = make_input(layer, 0, 2, torch.bfloat16)
    found = on_every_variant(layer, x, ids, weights)
    assert found.shape == (0, 64)
    assert found.dtype == torch.bfloat16


@pytest.mark.parametrize("tokens", [3, 40])
def test_what_is_not_finite_stays_in_its_token(tokens: int) -> None:
    layer = make_layer()
    x, ids, weights = make_input(layer, tokens, 2)
    clean = layer(x, ids, weights)
    x[1, 7] = torch.nan
    x[2, 63] = torch.inf
    found = on_every_variant(layer, x, ids, weights)
    assert found[1:3].isnan().all()
    rest = [t for t in range(tokens) if t not in (1, 2)]
    assert torch.equal(found[rest], clean[rest])


def test_strided_inputs_and_leading_dimensions() -> None:
    layer = make_layer()
    x, ids, weights = make_input(layer, 12, 2)
    expected = layer(x, ids, weights)
    wide = torch.zeros(12, 100)
    wide[:, 10:74] = x
    wide_ids = torch.zeros(12, 5, dtype=torch.int64)
    wide_ids[:, 1:5:2] = ids
    assert torch.equal(layer(wide[:, 10:74], wide_ids[:, 1:5:2], weights), expected)
    deep = layer(x.view(3, 4, 64), ids.view(3, 4, 2), weights.view(3, 4, 2))
    assert torch.equal(deep, expected.view(3, 4, 64))
    assert torch.equal(layer(x.t().contiguous().t(), ids, weights.t().contiguous().t()), expected)


def test_weights_may_be_slices() -> None:
    layer = make_layer(experts=4)
    x, ids, weights = make_input(layer, 12, 2)
    ids = ids % 2
    part = Layer(layer.gate_up[2:], layer.down[2:], 64, 48)
    assert torch.equal(part(x, ids, weights), layer(x, ids + 2, weights))


def test_opcheck() -> None:
    layer = make_layer(bias=torch.float32)
    x, ids, weights = make_input(layer, 5, 2)
    options = layer.options()
    order = ("gate_up", "down", "intermediate", "scheme", "activation")
    torch.library.opcheck(
        torch.ops.armllm.int4_moe.default,
        (x, ids, weights, *(options[name] for name in order)),
        {"gate_up_bias": layer.gate_up_bias, "down_bias": layer.down_bias, "weigh_input": True},
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scheme": "g33"}, "unknown scheme 'g33'"),
        ({"scheme": "row"}, "bytes a panel"),
        ({"activation": "tanh"}, "unknown activation 'tanh'"),
        ({"intermediate": 16}, "panels an expert"),
        ({"gated": False}, "6 panels an expert; intermediate .without a gate. needs 3"),
        ({"intermediate": 0}, "must be positive"),
        ({"down": torch.zeros(3, 4, 640, dtype=torch.uint8)}, "down holds 3|experts, down 3"),
        ({"gate_up_bias": torch.zeros(4, 48)}, "gate_up_bias has 192 elements"),
        ({"down_bias": torch.zeros(7)}, "down_bias has 7 elements"),
        ({"expert_ids": torch.zeros(5, 2)}, "int64 or int32"),
        ({"expert_ids": torch.zeros(4, 2, dtype=torch.int64)}, "expert_ids has 4 rows; x has 5"),
        ({"expert_weights": torch.zeros(5, 1)}, "expert_weights has 1 columns, expert_ids 2"),
    ],
)
def test_errors_say_what_is_wrong(change: dict[str, object], message: str) -> None:
    layer = make_layer()
    x, ids, weights = make_input(layer, 5, 2)
    options = {"x": x, "expert_ids": ids, "expert_weights": weights} | layer.options() | change
    with pytest.raises(RuntimeError, match=message):
        moe.int4_moe(**options)
