"""`int4_moe`: each token has the same bits in every batch and with any distribution over experts."""

from __future__ import annotations

import pytest
import torch

from tests.support.moe_layer import (
    MoeLayer,
    assert_close,
    make_input,
    make_layer,
    run_all_variants,
)


@pytest.mark.parametrize("tokens", [1, 12, 50])
def test_thread_count_does_not_change_bits(tokens: int) -> None:
    layer = make_layer(hidden=160, intermediate=96)
    x, ids, weights = make_input(layer, tokens, 2)
    ids[:, 0] = 3  # one expert with many rows is split into narrower tiles
    threads_before = torch.get_num_threads()
    outputs = []
    try:
        for threads in (1, 2, 24):
            torch.set_num_threads(threads)
            outputs.append(layer(x, ids, weights))
    finally:
        torch.set_num_threads(threads_before)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("tokens", [1, 8, 9, 300])
def test_all_tokens_on_one_expert_match_reference(tokens: int) -> None:
    layer = make_layer(experts=6, activation="relu")
    x, _, _ = make_input(layer, tokens, 1)
    ids, weights = torch.full((tokens, 1), 4), torch.ones(tokens, 1)
    actual = run_all_variants(layer, x, ids, weights)
    assert_close(actual[-5:], layer.reference(x[-5:], ids[-5:], weights[-5:]), 1e-6)


@pytest.mark.parametrize("tokens", [1, 2, 20])
def test_repeated_expert_ids_are_summed(tokens: int) -> None:
    layer = make_layer()
    x, ids, _ = make_input(layer, tokens, 1)
    repeated = layer(x, ids.expand(tokens, 12), torch.full((tokens, 12), 0.25))
    assert_close(repeated, layer(x, ids, torch.full((tokens, 1), 3.0)), 1e-6)


@pytest.mark.parametrize("expert", [-1, 4, 2**31 - 1, 2**32, 2**40, -(2**63)])
def test_expert_ids_out_of_range_raise(expert: int) -> None:
    layer = make_layer()
    x, ids, weights = make_input(layer, 12, 3)
    ids[7, 1] = expert
    message = f"names expert {expert} as choice 1 of token 7, but gate_up holds experts 0 to 3"
    with pytest.raises(RuntimeError, match=message):
        layer(x, ids, weights)
    if -(2**31) <= expert < 2**31:
        with pytest.raises(RuntimeError, match=message):
            layer(x, ids.to(torch.int32), weights)


def test_large_batch_equals_single_tokens_bitwise() -> None:
    layer = make_layer(experts=3, hidden=790, intermediate=32, activation="relu", bias=torch.float32)
    x, ids, weights = make_input(layer, 700, 2)
    actual = run_all_variants(layer, x, ids, weights)
    for t in (0, 350, 699):
        alone = layer(x[t : t + 1], ids[t : t + 1], weights[t : t + 1])
        assert torch.equal(actual[t : t + 1], alone)
    assert_close(actual[-3:], layer.reference(x[-3:], ids[-3:], weights[-3:]), 1e-6)


@pytest.mark.parametrize("tokens", [3, 40])
def test_non_finite_values_affect_their_token_only(tokens: int) -> None:
    layer = make_layer()
    x, ids, weights = make_input(layer, tokens, 2)
    clean = layer(x, ids, weights)
    x[1, 7] = torch.nan
    x[2, 63] = torch.inf
    actual = run_all_variants(layer, x, ids, weights)
    assert actual[1:3].isnan().all()
    rest = [t for t in range(tokens) if t not in (1, 2)]
    assert torch.equal(actual[rest], clean[rest])


def test_sliced_expert_weights_are_accepted() -> None:
    layer = make_layer(experts=4)
    x, ids, weights = make_input(layer, 12, 2)
    ids = ids % 2
    part = MoeLayer(layer.gate_up[2:], layer.down[2:], 64, 48)
    assert torch.equal(part(x, ids, weights), layer(x, ids + 2, weights))
