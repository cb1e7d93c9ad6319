"""`int4_moe` against its reference, on every kernel variant."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.moe_layer import (
    VARIANTS,
    MoeLayer,
    assert_close,
    make_input,
    make_layer,
    random_experts,
    run_all_variants,
)
from torch_armllm.ops import linear, moe, variants

EXACT = linear.EXACT
FLOAT = tuple(name for name in linear.SCHEMES if name not in EXACT)


@pytest.mark.parametrize("scheme", EXACT)
@pytest.mark.parametrize("bias", [None, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_exact_schemes_match_reference(scheme: str, bias: torch.dtype | None, tokens: int) -> None:
    # ReLU is exact, so results differ only by the float32 rounding of the weighted sum.
    layer = make_layer(scheme=scheme, activation="relu", bias=bias)
    inputs = make_input(layer, tokens, 2)
    assert_close(run_all_variants(layer, *inputs), layer.reference(*inputs), 1e-6)


@pytest.mark.parametrize("scheme", ["g32i", "g32iz", "i8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 60])
def test_rotated_experts_match_reference(tokens: int, dtype: torch.dtype, scheme: str) -> None:
    layer = replace(make_layer(scheme=scheme, activation="relu", intermediate=96), rotated=True)
    x, ids, weights = make_input(layer, tokens, 2)
    x[:, 3] *= 60
    found = run_all_variants(layer, x.to(dtype), ids, weights)
    bound = 3e-5 if scheme == "i8" else 1e-6  # longer sums of larger products
    assert_close(found, layer.reference(x.to(dtype), ids, weights), bound if dtype == torch.float32 else 8e-3)
    weighed = replace(layer, weigh_input=True)
    assert_close(weighed(x, ids, weights), weighed.reference(x, ids, weights), bound)
    assert not torch.allclose(replace(layer, rotated=False)(x, ids, weights), layer(x, ids, weights))


@pytest.mark.parametrize(
    "activation", ["silu", "gelu", "gelu_tanh", "swiglu_clamped", "silu_clamped", "silu_softcapped"]
)
def test_activations_match_reference(activation: str) -> None:
    layer = make_layer(activation=activation, bias=torch.float32)
    inputs = make_input(layer, 20, 2)
    assert_close(run_all_variants(layer, *inputs), layer.reference(*inputs), 1e-2)


@pytest.mark.parametrize("activation", ["swiglu_clamped", "silu_clamped", "silu_softcapped"])
def test_clamp_limit_is_applied(activation: str) -> None:
    layer = make_layer(activation=activation)
    x, ids, weights = make_input(layer, 6, 2)
    options = layer.options() | {"limit": 0.5, "up_limit": 0.8}
    actual = moe.int4_moe(4 * x, ids, weights, **options)
    assert_close(actual, moe.reference_int4_moe(4 * x, ids, weights, **options), 1e-2)
    assert not torch.allclose(actual, layer(4 * x, ids, weights))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 60])
@pytest.mark.parametrize("intermediate", [16, 72, 280])
def test_ungated_experts_match_reference(tokens: int, intermediate: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    up = random_experts(4, intermediate, 64, "g32i", generator)
    down = random_experts(4, 64, intermediate, "g32i", generator)
    layer = MoeLayer(up, down, 64, intermediate, activation="relu", gated=False)
    if bias:
        layer.gate_up_bias = torch.randn(4, intermediate, generator=generator)
        layer.down_bias = torch.randn(4, 64, generator=generator)
    inputs = make_input(layer, tokens, 2)
    actual = run_all_variants(layer, *inputs)
    assert_close(actual, layer.reference(*inputs), 1e-6)
    duplicated = MoeLayer(linear.interleave_panels(up, up), down, 64, intermediate, activation="relu")
    if bias:
        duplicated.gate_up_bias = torch.stack([layer.gate_up_bias, layer.gate_up_bias], 1)
        duplicated.down_bias = layer.down_bias
    assert torch.equal(duplicated(*inputs), actual)


@pytest.mark.parametrize("tokens", [1, 5, 60])
def test_weigh_input_scales_the_expert_inputs(tokens: int) -> None:
    layer = make_layer(bias=torch.float32, activation="relu")
    layer.weigh_input = True
    x, ids, weights = make_input(layer, tokens, 2)
    actual = run_all_variants(layer, x, ids, weights)
    assert_close(actual, layer.reference(x, ids, weights), 1e-6)
    first, second = (
        MoeLayer(layer.gate_up, layer.down, 64, 48, "g32i", "relu", layer.gate_up_bias, layer.down_bias)(
            x * weights[:, j : j + 1], ids[:, j : j + 1], torch.ones(tokens, 1)
        )
        for j in (0, 1)
    )
    assert_close(actual, first + second, 1e-6)


@pytest.mark.parametrize("weigh_input", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("hidden", "tokens"), [(1, 1), (70, 3), (790, 1), (790, 40)])
def test_identity_experts_return_their_input(
    hidden: int, tokens: int, dtype: torch.dtype, weigh_input: bool
) -> None:
    layer = make_layer(3, hidden, activation="relu", bias=torch.float32)
    layer.identity_experts, layer.weigh_input = 4, weigh_input
    x, ids, weights = make_input(layer, tokens, 5, dtype)
    ids[0] = torch.tensor([6, 3, 4, 6, 5])  # no expert with weights, and one twice
    actual = run_all_variants(layer, x, ids, weights)
    assert_close(actual, layer.reference(x, ids, weights), 1e-6 if dtype == torch.float32 else 1e-2)
    assert_close(actual[0], x[0], 1e-6 if dtype == torch.float32 else 1e-2)  # the weights' sum is 1
    for t in range(tokens):
        alone = layer(x[t : t + 1], ids[t : t + 1], weights[t : t + 1])
        assert torch.equal(actual[t : t + 1], alone)


def test_identity_experts_keep_rows_that_are_not_finite_apart() -> None:
    layer = make_layer(activation="relu")
    layer.identity_experts = 2
    x, ids, weights = make_input(layer, 6, 2)
    expected = layer(x, ids, weights)
    ids[2], ids[4] = torch.tensor([4, 5]), torch.tensor([5, 4])
    x[2], x[4, 7] = float("nan"), float("inf")
    actual = run_all_variants(layer, x, ids, weights)
    assert actual[2].isnan().all()
    assert actual[4, 7] == float("inf") and int(actual[4].isfinite().sum()) == 63
    rest = [0, 1, 3, 5]
    assert torch.equal(actual[rest], expected[rest])


def test_ids_after_the_identity_experts_raise() -> None:
    layer = make_layer()
    layer.identity_experts = 2
    x, ids, weights = make_input(layer, 5, 2)
    ids[3, 1] = 6
    message = "names expert 6 as choice 1 of token 3, .* experts 0 to 3 and identities follow to 5"
    with pytest.raises(RuntimeError, match=message):
        layer(x, ids, weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32])
def test_every_dtype_matches_reference(dtype: torch.dtype, ids_dtype: torch.dtype) -> None:
    layer = make_layer()
    x, ids, weights = make_input(layer, 5, 2, dtype)
    actual = run_all_variants(layer, x, ids.to(ids_dtype), weights.to(dtype))
    assert actual.dtype == dtype
    assert_close(actual, layer.reference(x, ids, weights.to(dtype)), 1e-2)


@pytest.mark.parametrize("scheme", FLOAT)
def test_float_group_scales_match_reference_within_tolerance(scheme: str) -> None:
    """Experts with many rows fold the group scales, so the results are not exact."""
    layer = make_layer(scheme=scheme, hidden=150, intermediate=72, bias=torch.bfloat16)
    for tokens in (2, 40):
        inputs = make_input(layer, tokens, 2)
        expected = layer.reference(*inputs)
        for name in VARIANTS:
            with variants.use(name):
                assert_close(layer(*inputs), expected, 4e-2)


@settings(max_examples=10, deadline=None)
@given(
    experts=st.integers(1, 9),
    hidden=st.integers(1, 100),
    intermediate=st.integers(1, 70),
    tokens=st.integers(0, 30),
    top_k=st.integers(1, 9),
    identities=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_random_shapes_match_reference(
    experts: int, hidden: int, intermediate: int, tokens: int, top_k: int, identities: int, seed: int
) -> None:
    layer = make_layer(experts, hidden, intermediate, activation="relu", seed=seed)
    layer.identity_experts = identities
    inputs = make_input(layer, tokens, min(top_k, experts + identities), seed=seed)
    actual = run_all_variants(layer, *inputs)
    assert actual.shape == inputs[0].shape
    if tokens:
        assert_close(actual, layer.reference(*inputs), 1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scheme": "g33"}, "unknown scheme 'g33'"),
        ({"scheme": "row"}, "bytes per panel"),
        ({"activation": "tanh"}, "unknown activation 'tanh'"),
        ({"intermediate": 16}, "panels per expert"),
        ({"gated": False}, "6 panels per expert; intermediate .without a gate. needs 3"),
        ({"intermediate": 0}, "must be positive"),
        ({"identity_experts": -1}, "identity_experts must not be negative, not -1"),
        ({"down": torch.zeros(3, 4, 640, dtype=torch.uint8)}, "same number of experts, not .* and 3"),
        ({"gate_up_bias": torch.zeros(4, 48)}, "gate_up_bias has 192 elements"),
        ({"down_bias": torch.zeros(7)}, "down_bias has 7 elements"),
        ({"expert_ids": torch.zeros(5, 2)}, "int64 or int32"),
        ({"expert_ids": torch.zeros(4, 2, dtype=torch.int64)}, "expert_ids has 4 rows; x has 5"),
        ({"expert_weights": torch.zeros(5, 1)}, "expert_weights has 1 columns, but expert_ids has 2"),
    ],
)
def test_invalid_arguments_raise(change: dict[str, object], message: str) -> None:
    layer = make_layer()
    x, ids, weights = make_input(layer, 5, 2)
    options = {"x": x, "expert_ids": ids, "expert_weights": weights} | layer.options() | change
    with pytest.raises(RuntimeError, match=message):
        moe.int4_moe(**options)
