"""`int4_moe_lora`: experts with adapters against their reference, on every kernel variant."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.moe_layer import VARIANTS, MoeLayer, assert_close, make_input, make_layer, random_experts
from torch_armllm.ops import lora, moe, variants

KINDS = (torch.float32, torch.bfloat16, torch.int8)


def make_adapters(
    layer: MoeLayer, tokens: int, dtype: torch.dtype = torch.float32, slots: int = 3, rank: int = 5
) -> moe.ExpertAdapters:
    """Returns random adapters of all ranks up to the largest, 0 included, and slots of the tokens."""
    torch.manual_seed(tokens)
    experts, parts = len(layer.gate_up), 2 if layer.gated else 1

    def packed(factors: Tensor) -> Tensor:
        return lora.lora_integers(factors) if dtype == torch.int8 else factors.to(dtype)

    def pair(rank: int, inputs: int, outputs: int, parts: int) -> tuple[Tensor, Tensor]:
        a = torch.randn(slots, experts, rank, inputs) / inputs**0.5
        b = torch.randn(slots, experts, parts, rank, outputs) / rank**0.5
        return packed(a), packed(lora.lora_blocks(b))

    inner = pair(rank, layer.hidden, layer.intermediate, parts)
    outer = pair(rank + 3, layer.intermediate, layer.hidden, 1)
    ranks = [torch.tensor([n, 0, 2][:slots], dtype=torch.int32) for n in (rank, rank + 3)]
    ranks[1][1:2] = 1
    adapters = torch.randint(-1, slots, (tokens,), dtype=torch.int32)
    return moe.ExpertAdapters(*inner, ranks[0], *outer, ranks[1], adapters)


Inputs = tuple[Tensor, Tensor, Tensor]


def options_of(layer: MoeLayer) -> dict[str, Any]:
    return {name: value for name, value in layer.options().items() if name != "weigh_input"}


def run(layer: MoeLayer, inputs: Inputs, adapters: moe.ExpertAdapters) -> Tensor:
    return moe.int4_moe_lora(*inputs, adapters=adapters, **options_of(layer))


def expected_of(layer: MoeLayer, inputs: Inputs, adapters: moe.ExpertAdapters) -> Tensor:
    return moe.reference_int4_moe_lora(*inputs, **options_of(layer), **adapters._asdict())


@pytest.mark.parametrize(
    ("tokens", "intermediate", "dtype"),
    [
        (0, 72, KINDS[0]),
        (1, 280, KINDS[1]),
        (2, 72, KINDS[2]),
        (7, 16, KINDS[0]),
        (90, 280, KINDS[2]),
        (90, 16, KINDS[1]),
    ],
)
def test_matches_reference_in_all_variants(tokens: int, intermediate: int, dtype: torch.dtype) -> None:
    layer = make_layer(activation="relu", bias=torch.bfloat16, hidden=96, intermediate=intermediate)
    inputs, adapters = make_input(layer, tokens, 2), make_adapters(layer, tokens, dtype)
    plain = layer(*inputs)
    results = []
    for name in VARIANTS:
        with variants.use(name):
            results.append(run(layer, inputs, adapters))
    for found in results:
        assert torch.equal(found, results[0])
    assert found.shape == plain.shape
    if tokens:
        expected = expected_of(layer, inputs, adapters)
        # a last bit of a sum can move an intermediate value by one INT8 step
        assert_close(found, expected, 1e-2)
        assert (found - expected).abs().median() < 1e-5 * expected.abs().max()
    untouched = adapters.adapters < 0
    assert torch.equal(found[untouched], plain[untouched])
    touched = adapters.adapters >= 0
    assert not bool((found[touched] == plain[touched]).all(-1).any())


@pytest.mark.parametrize("bias", [False, True])
def test_experts_without_a_gate(bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    up, down = random_experts(4, 72, 64, "g32i", generator), random_experts(4, 64, 72, "g32i", generator)
    layer = MoeLayer(up, down, 64, 72, activation="relu", gated=False)
    if bias:
        layer.gate_up_bias, layer.down_bias = torch.randn(4, 72), torch.randn(4, 64)
    inputs, adapters = make_input(layer, 40, 2), make_adapters(layer, 40)
    expected = expected_of(layer, inputs, adapters)
    found = run(layer, inputs, adapters)
    assert_close(found, expected, 1e-2)
    assert (found - expected).abs().median() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("tokens", [2, 33])
def test_rotated_experts_and_identities(tokens: int) -> None:
    layer = replace(make_layer(activation="relu", intermediate=96), rotated=True, identity_experts=2)
    x, ids, weights = make_input(layer, tokens, 3)
    x[:, 3] *= 60
    adapters = make_adapters(layer, tokens)
    expected = expected_of(layer, (x, ids, weights), adapters)
    assert_close(run(layer, (x, ids, weights), adapters), expected, 1e-2)


def test_a_token_may_name_an_expert_twice() -> None:
    layer = make_layer(activation="relu")
    x, _, weights = make_input(layer, 20, 2)
    ids = torch.full((20, 2), 1)
    adapters = make_adapters(layer, 20)
    expected = expected_of(layer, (x, ids, weights), adapters)
    assert_close(run(layer, (x, ids, weights), adapters), expected, 1e-2)


def test_tokens_past_the_list_have_no_adapter() -> None:
    layer = make_layer()
    inputs, adapters = make_input(layer, 9, 2), make_adapters(layer, 9)
    short = adapters._replace(adapters=torch.zeros(4, dtype=torch.int32))
    plain, found = layer(*inputs), run(layer, inputs, short)
    assert torch.equal(found[4:], plain[4:]) and not torch.equal(found[3], plain[3])
    none = adapters._replace(adapters=torch.zeros(0, dtype=torch.int32))
    assert torch.equal(run(layer, inputs, none), plain)
