"""`select_tokens`, and `mla_attention` of selected tokens, against their references, on every variant."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.paged_steps import PagedPlaces, PagedSteps, starts
from torch_armllm.ops import mla, select, variants

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 5e-3, torch.int8: 1e-2}
RUNNABLE = variants.machine().distinct("select", "attention")


@dataclass(frozen=True)
class Batch(PagedSteps):
    """Sequences with cached keys of an indexer and latents, and the queries of their last tokens."""

    q: Tensor
    weights: Tensor
    keys: Tensor
    top_k: int
    latents: Tensor
    q_latent: Tensor

    def arguments(self) -> tuple[Tensor | int | float, ...]:
        return self.q, self.weights, self.keys, *self.steps, 0.25, self.top_k

    def run(self) -> Tensor:
        return select.select_tokens(*self.arguments())  # type: ignore[arg-type]

    def reference(self) -> Tensor:
        return select.reference_select_tokens(*self.arguments())  # type: ignore[arg-type]

    def attention_arguments(self, selected: Tensor | None) -> tuple[Tensor | int | float | None, ...]:
        queries = self.q_latent.split([24, 8], -1)
        return *queries, self.latents, *self.steps, 0.2, None, selected

    def attend(self, selected: Tensor | None) -> Tensor:
        return mla.mla_attention(*self.attention_arguments(selected))  # type: ignore[arg-type]

    def attend_reference(self, selected: Tensor | None) -> Tensor:
        return mla.reference_mla_attention(*self.attention_arguments(selected))  # type: ignore[arg-type]


def make_batch(
    seq_lens: tuple[int, ...],
    query_lens: tuple[int, ...],
    *,
    top_k: int = 16,
    heads: int = 5,
    head_size: int = 20,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype = torch.float32,
    latent_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Batch:
    """Makes a random batch with blocks in random order and NaN in unused positions.

    Queries and keys of the indexer are small whole numbers: scores are exact, and many are equal.
    """
    random = torch.Generator().manual_seed(seed)
    places = PagedPlaces.random(seq_lens, block_size, random)
    keys = torch.full((places.blocks, block_size, head_size), math.nan, dtype=cache_dtype)
    latents = mla.new_latent_cache(places.blocks, 24, 8, block_size, latent_dtype or cache_dtype)
    latents.fill_(-1 if latent_dtype == torch.int8 else math.nan)  # scales of bytes −1 are NaN
    for length, slots in places:
        whole = torch.randint(-2, 3, (length, head_size), generator=random)
        keys.view(-1, head_size)[slots] = whole.to(cache_dtype)
        mla.mla_write(*torch.randn(length, 32, generator=random).split([24, 8], -1), latents, slots)
    tokens = sum(query_lens)
    q = torch.randint(-2, 3, (tokens, heads, head_size + 3), generator=random)[..., 2:-1]
    weights = torch.randint(-3, 4, (tokens, heads + 1), generator=random)[:, 1:] / 4
    q_latent = torch.randn(tokens, 4, 32, generator=random)
    return Batch(
        *(places.block_table, seq_lens, query_lens),
        *(q.to(dtype), weights.to(dtype), keys, top_k, latents, q_latent.to(dtype)),
    )


def check(batch: Batch) -> None:
    """Asserts that every variant selects what the reference does, and attends to it."""
    expected = batch.reference()
    attended = batch.attend_reference(expected)
    tolerance = max(TOLERANCE[t.dtype] for t in (batch.q, batch.keys, batch.latents))
    for name in RUNNABLE:
        with variants.use(name):
            selected = batch.run()
            assert torch.equal(selected, expected), name
            out = batch.attend(selected)
        torch.testing.assert_close(out, attended, rtol=tolerance, atol=tolerance)


CASES = {
    "one token": make_batch((1,), (1,), top_k=1),
    "fewer than top_k": make_batch((15, 16), (15, 2)),
    "one more than top_k": make_batch((17,), (17,)),
    "decode": make_batch((100, 700, 16, 3), (1, 1, 1, 1)),
    "chunk": make_batch((333,), (60,), top_k=100),
    "mixed": make_batch((300, 40, 0, 7, 9), (1, 40, 0, 3, 9), top_k=33),
    "over splits": make_batch((900,), (3,), top_k=600),
    "one head": make_batch((90,), (5,), heads=1, head_size=2),
    "more heads": make_batch((90,), (5,), heads=11, head_size=129),
    "many sequences": make_batch((20, 300, 1) * 7, (1, 2, 0) * 7, top_k=17),
    "int8 latents": make_batch((300, 40, 7), (20, 1, 3), top_k=33, latent_dtype=torch.int8),
    "top_k of one": make_batch((50,), (50,), top_k=1),
}


@pytest.mark.parametrize("name", CASES)
def test_matches_reference(name: str) -> None:
    check(CASES[name])


@settings(max_examples=60, deadline=None)
@given(
    scores=st.lists(
        st.sampled_from((0.0, -0.0, 1.0, -1.0, 1e-42, -1e-42, 2.5, math.inf, -math.inf, math.nan)),
        min_size=3,
        max_size=80,
    ),
    top_k=st.integers(1, 80),
)
def test_any_scores_are_ordered(scores: list[float], top_k: int) -> None:
    """With one head of one element and a weight of one, the scores of positive keys are the keys."""
    values = torch.tensor(scores)
    keys = torch.zeros(96)
    keys[: len(scores)] = values
    table, lengths = torch.arange(6, dtype=torch.int32)[None], torch.tensor([len(scores)], dtype=torch.int32)
    one = torch.ones(1, 1)
    got = select.select_tokens(
        *(one[:, None], one, keys.view(6, 16, 1), table, starts((1,)), lengths, len(scores), 1.0, top_k)
    )
    count = min(top_k, len(scores))
    expected = select.reference.highest(values.relu().nan_to_num(nan=math.inf, posinf=3e38), count)
    assert got[0, :count].tolist() == expected.tolist()
    assert (got[0, count:] == -1).all()


@pytest.mark.parametrize("variant", RUNNABLE)
def test_selecting_all_positions_has_the_bits_of_dense_attention(variant: str) -> None:
    batch = make_batch((300, 20), (9, 20), top_k=300)
    with variants.use(variant):
        dense = batch.attend(None)
        assert torch.equal(batch.attend(batch.run()), dense)
        # positions of a token beside one of a longer sequence: 0 … 299 of 301
        longer = make_batch((301,), (4,), top_k=300)
        assert torch.equal(longer.attend(longer.run())[:3], longer.attend(None)[:3])
