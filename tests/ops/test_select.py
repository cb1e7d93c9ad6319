"""`select_tokens` and `select_blocks`: the order of any scores, and attention to all that may be selected."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.paged_calls import latent_call, paged_call
from tests.ops.properties import OpCall
from torch_armllm.ops import select, variants
from torch_armllm.ops.select.blocks import block_scores
from torch_armllm.ops.select.reference import highest

RUNNABLE = variants.machine().distinct("select", "block_select", "attention")
SCORES = st.sampled_from((0.0, -0.0, 1.0, -1.0, 1e-42, -1e-42, 2.5, math.inf, -math.inf, math.nan))


def one_token(length: int, blocks: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """Returns the steps of a text whose last token is new."""
    table, starts = torch.arange(blocks, dtype=torch.int32)[None], torch.tensor([0, 1], dtype=torch.int32)
    return table, starts, torch.tensor([length], dtype=torch.int32), length


@settings(max_examples=60, deadline=None)
@given(scores=st.lists(SCORES, min_size=3, max_size=80), top_k=st.integers(1, 80))
def test_any_scores_of_tokens_are_ordered(scores: list[float], top_k: int) -> None:
    """With one head of one element and a weight of one, the scores of positive keys are the keys."""
    values, one = torch.tensor(scores), torch.ones(1, 1)
    keys = torch.zeros(96)
    keys[: len(scores)] = values
    steps = one_token(len(scores), 6)
    got = select.select_tokens(one[:, None], one, keys.view(6, 16, 1), *steps, 1.0, top_k)
    count = min(top_k, len(scores))
    expected = highest(values.relu().nan_to_num(nan=math.inf, posinf=3e38), count)
    assert got[0, :count].tolist() == expected.tolist()
    assert (got[0, count:] == -1).all()


@settings(max_examples=60, deadline=None)
@given(keys=st.lists(SCORES, min_size=3, max_size=112), top_k=st.integers(1, 6), nearest=st.integers(0, 2))
def test_any_scores_of_blocks_are_ordered(keys: list[float], top_k: int, nearest: int) -> None:
    """With one head of one element and a query of one, the products are the keys."""
    values, one = torch.full((112,), math.nan), torch.ones(1, 1, 1)
    values[: len(keys)] = torch.tensor(keys)
    steps = one_token(len(keys), 7)
    scores = block_scores(one, values[: len(keys), None], steps[2].long(), 16, nearest)[0, 0]
    expected = highest(scores, top_k).tolist()
    for name in RUNNABLE:
        with variants.use(name):
            got = select.select_blocks(one, values.view(7, 16, 1), *steps, 16, top_k, nearest)[0, 0].tolist()
        assert got == expected + [-1] * (top_k - len(expected))


def numbers(lengths: tuple[int, ...], new: tuple[int, ...], span: int, count: int) -> Tensor:
    """Returns the first ``count`` spans of positions that each new token sees: int32 (tokens, count)."""
    seen = torch.cat([torch.arange(length - n, length) + 1 for length, n in zip(lengths, new, strict=True)])
    order = torch.arange(count, dtype=torch.int32)
    return torch.where(order < -(-seen // span)[:, None], order, -1)


def chosen_call(dense: OpCall, chosen: Tensor, span: int) -> OpCall:
    """Returns the call of `block_attention` that has a call's texts."""
    names = [argument.name for argument in torch.ops.armllm.block_attention.default._schema.arguments]
    own = {name: value for name, value in dense.arguments.items() if name in names}
    return OpCall("block_attention", {**own, "chosen": chosen, "span": span})


@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize(("lengths", "new"), [((300, 20), (9, 20)), ((301,), (4,))])
def test_selecting_all_positions_has_the_bits_of_dense_attention(
    variant: str, lengths: tuple[int, ...], new: tuple[int, ...]
) -> None:
    """The last token of 301 selects 300: tokens that select all have the same bits beside it."""
    call = latent_call(lengths, new, 4)
    with variants.use(variant):
        (dense,), (found,) = call.run(), call.replaced(selected=numbers(lengths, new, 1, 300)).run()
    same = len(dense) - (lengths[0] > 300)
    assert torch.equal(found[:same], dense[:same])


@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize(("lengths", "new"), [((320, 20), (9, 20)), ((321,), (9,))])
def test_choosing_all_blocks_has_the_bits_of_dense_attention(
    variant: str, cache_dtype: torch.dtype, lengths: tuple[int, ...], new: tuple[int, ...]
) -> None:
    call = paged_call(lengths, new, (6, 2), 24, cache_dtype)
    chosen = numbers(lengths, new, 32, 10)[:, None].expand(-1, 2, -1).contiguous()
    with variants.use(variant):
        (dense,), (found,) = call.run(), chosen_call(call, chosen, 32).run()
    same = len(dense) - (lengths[0] > 320)
    assert torch.equal(found[:same], dense[:same])


def test_choices_of_other_blocks_are_refused() -> None:
    lengths, new = (130, 20), (4, 1)
    call = paged_call(lengths, new, (6, 2))
    chosen = numbers(lengths, new, 32, 2)[:, None].expand(-1, 2, -1).contiguous()
    chosen_call(call, chosen, 32).run()
    for wrong, message in (
        (torch.cat([chosen, chosen[:, :1]], 1), "divide 2"),
        (chosen + 30, "chosen has block"),
        (chosen.flip(2), "ascending order"),
        (torch.full_like(chosen, -1), "chosen has block -1 for token 0 and head 0"),
    ):
        with pytest.raises(RuntimeError, match=message):
            chosen_call(call, wrong.contiguous(), 32).run()


def test_scores_are_those_of_seen_positions() -> None:
    keys = torch.arange(20.0)[:, None]
    scores = block_scores(torch.ones(2, 1, 1), keys, torch.tensor([3, 18]), 16, nearest=0)
    assert scores.tolist() == [[[2.0, -math.inf], [15.0, 17.0]]]
