"""`int4_moe` against its reference, on every kernel variant."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.moe_layer import (
    VARIANTS,
    assert_close,
    make_input,
    make_layer,
    run_all_variants,
)
from torch_armllm.ops import linear, variants

EXACT = linear.EXACT
FLOAT = tuple(name for name in linear.SCHEMES if name not in EXACT)


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
