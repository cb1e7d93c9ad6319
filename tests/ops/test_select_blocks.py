"""`select_blocks`, and `block_attention` to what it selects, against their references, on every variant."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.paged_steps import PagedPlaces, PagedSteps, starts
from torch_armllm.ops import attention, select, variants
from torch_armllm.ops.attention import KvCache
from torch_armllm.ops.select.blocks import block_scores
from torch_armllm.ops.select.reference import highest

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CACHES = (*FLOATS, torch.int8)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.int8: 3e-2}
RUNNABLE = variants.machine().distinct("block_select", "attention")


@dataclass(frozen=True)
class Batch(PagedSteps):
    """Sequences with cached keys of an indexer, keys and values, and the queries of their last tokens."""

    index_q: Tensor
    index_keys: Tensor
    q: Tensor
    cache: KvCache
    span: int
    top_k: int
    nearest: int

    def arguments(self) -> tuple[Tensor | int | float, ...]:
        return self.index_q, self.index_keys, *self.steps, self.span, self.top_k, self.nearest

    def run(self) -> Tensor:
        return select.select_blocks(*self.arguments())  # type: ignore[arg-type]

    def reference(self) -> Tensor:
        return select.reference_select_blocks(*self.arguments())  # type: ignore[arg-type]

    def attention_arguments(self, chosen: Tensor) -> tuple[Tensor | int | float | None, ...]:
        k, v, *scales = self.cache
        return self.q, k, v, chosen, self.span, *self.steps, 0.2, *scales

    def attend(self, chosen: Tensor) -> Tensor:
        return attention.block_attention(*self.attention_arguments(chosen))  # type: ignore[arg-type]

    def attend_reference(self, chosen: Tensor) -> Tensor:
        return attention.reference_block_attention(*self.attention_arguments(chosen))  # type: ignore[arg-type]

    def dense(self) -> Tensor:
        k, v, *scales = self.cache
        return attention.paged_attention(self.q, k, v, *self.steps, 0.2, 0, 0.0, None, *scales)


def make_batch(
    seq_lens: tuple[int, ...],
    query_lens: tuple[int, ...],
    *,
    span: int = 32,
    top_k: int = 2,
    nearest: int = 1,
    kv_heads: int = 2,
    choosers: int | None = None,
    group: int = 3,
    head_size: int = 24,
    index_size: int = 20,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Batch:
    """Makes a random batch with blocks in random order and NaN in unused positions of the indexer's keys.

    Queries and keys of the indexer are small whole numbers: scores are exact, and many are equal.
    """
    random = torch.Generator().manual_seed(seed)
    places = PagedPlaces.random(seq_lens, block_size, random)
    key_dtype = cache_dtype if cache_dtype.is_floating_point else torch.bfloat16
    keys = torch.full((places.blocks, block_size, index_size), math.nan, dtype=key_dtype)
    cache = attention.new_kv_cache(places.blocks, kv_heads, head_size, head_size + 2, block_size, cache_dtype)
    for length, slots in places:
        whole = torch.randint(-2, 3, (length, index_size), generator=random)
        keys.view(-1, index_size)[slots] = whole.to(key_dtype)
        k, v = (torch.randn(length, kv_heads, head_size + n, generator=random) for n in (0, 2))
        attention.kv_write(k, v, cache.k, cache.v, slots, cache.k_scales, cache.v_scales)
    tokens, heads = sum(query_lens), choosers or kv_heads
    index_q = torch.randint(-2, 3, (tokens, heads, index_size + 3), generator=random)[..., 2:-1]
    q = torch.randn(tokens, kv_heads * group + 1, head_size, generator=random)[:, 1:]
    return Batch(
        *(places.block_table, seq_lens, query_lens),
        *(index_q.to(dtype), keys, q.to(dtype), cache, span, top_k, nearest),
    )


def check(batch: Batch) -> None:
    """Asserts that every variant selects what the reference does, and attends to it."""
    expected = batch.reference()
    attended = batch.attend_reference(expected)
    tolerance = max(TOLERANCE[batch.q.dtype], TOLERANCE[batch.cache.k.dtype])
    for name in RUNNABLE:
        with variants.use(name):
            chosen = batch.run()
            assert torch.equal(chosen, expected), name
            out = batch.attend(chosen)
        torch.testing.assert_close(out, attended, rtol=tolerance, atol=tolerance)


CASES = {
    "one token": make_batch((1,), (1,)),
    "as many as top_k": make_batch((64,), (15,)),
    "one more than top_k": make_batch((65,), (65,)),
    "decode": make_batch((100, 700, 16, 3), (1, 1, 1, 1)),
    "chunk": make_batch((333,), (60,), top_k=3),
    "mixed": make_batch((300, 40, 0, 7, 90), (1, 40, 0, 3, 9), span=16, top_k=3),
    "over splits": make_batch((900,), (3,), top_k=20, span=48),
    "one head": make_batch((90,), (5,), kv_heads=1, index_size=2, head_size=2, span=16),
    "more heads": make_batch((90,), (5,), kv_heads=5, index_size=129, head_size=70, group=1, span=16),
    "shared choice": make_batch((150,), (5,), kv_heads=4, choosers=2),
    "many sequences": make_batch((20, 300, 1) * 7, (1, 2, 0) * 7),
    "none is always selected": make_batch((290,), (50,), nearest=0, top_k=1),
    "more are nearest than selected": make_batch((290,), (50,), nearest=3, top_k=2),
    "many tokens": make_batch((180,), (150,), span=16),
    "long blocks": make_batch((1400,), (3,), span=640, block_size=64),
}


@pytest.mark.parametrize("name", CASES)
def test_matches_reference(name: str) -> None:
    check(CASES[name])


@settings(max_examples=60, deadline=None)
@given(
    keys=st.lists(
        st.sampled_from((0.0, -0.0, 1.0, -1.0, 1e-42, -1e-42, 2.5, math.inf, -math.inf, math.nan)),
        min_size=3,
        max_size=112,
    ),
    top_k=st.integers(1, 6),
    nearest=st.integers(0, 2),
)
def test_any_scores_are_ordered(keys: list[float], top_k: int, nearest: int) -> None:
    """With one head of one element and a query of one, the products are the keys."""
    values = torch.full((112,), math.nan)
    values[: len(keys)] = torch.tensor(keys)
    table, lengths = torch.arange(7, dtype=torch.int32)[None], torch.tensor([len(keys)], dtype=torch.int32)
    one = torch.ones(1, 1, 1)
    steps = (table, starts((1,)), lengths, len(keys))
    scores = block_scores(one, values[: len(keys), None], lengths.long(), 16, nearest)[0, 0]
    expected = highest(scores, top_k).tolist()
    for name in RUNNABLE:
        with variants.use(name):
            got = select.select_blocks(one, values.view(7, 16, 1), *steps, 16, top_k, nearest)[0, 0].tolist()
        assert got == expected + [-1] * (top_k - len(expected))


@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize("cache_dtype", CACHES)
def test_choosing_all_blocks_has_the_bits_of_dense_attention(variant: str, cache_dtype: torch.dtype) -> None:
    batch = make_batch((320, 20), (9, 20), top_k=10, cache_dtype=cache_dtype)
    with variants.use(variant):
        dense = batch.dense()
        assert torch.equal(batch.attend(batch.run()), dense)
        # tokens that choose all blocks beside one that does not
        longer = make_batch((321,), (9,), top_k=10, cache_dtype=cache_dtype)
        assert torch.equal(longer.attend(longer.run())[:8], longer.dense()[:8])


def test_choices_of_other_blocks_are_refused() -> None:
    batch = make_batch((130, 20), (4, 1))
    chosen = batch.run()
    for wrong, message in (
        (torch.cat([chosen, chosen[:, :1]], 1), "divide 2"),
        (chosen + 30, "chosen has block"),
        (chosen.flip(2), "ascending order"),
        (torch.full_like(chosen, -1), "chosen has block -1 for token 0 and head 0"),
    ):
        with pytest.raises(RuntimeError, match=message):
            batch.attend(wrong.contiguous())
