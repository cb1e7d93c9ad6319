"""`mla_write` and `mla_attention` against their references and expanded heads, and bit equality across
batches, chunks and threads."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from torch_armllm.ops import mla, variants

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CACHES = (*FLOATS, torch.int8)
# int8 latents are expanded to bfloat16
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.int8: 1e-2}
if "dotprod" in variants.machine().runnable:
    TOLERANCE[torch.float16] = 5e-3  # Arm kernels accumulate 32 products in float16
RUNNABLE = variants.machine().distinct("attention")


@dataclass(frozen=True)
class Batch:
    """Sequences in a latent cache, and the queries of their last tokens."""

    q_latent: Tensor
    q_rope: Tensor
    cache: Tensor
    block_table: Tensor
    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    sinks: Tensor | None = None
    window: int = 0

    def arguments(self) -> tuple[Tensor | int | float | None, ...]:
        lens = self.query_lens
        query_start = torch.tensor([sum(lens[:i]) for i in range(len(lens) + 1)], dtype=torch.int32)
        seq_lens = torch.tensor(self.seq_lens, dtype=torch.int32)
        scale = 1.0 / math.sqrt(self.q_latent.shape[-1] + self.q_rope.shape[-1])
        return (
            *(self.q_latent, self.q_rope, self.cache, self.block_table),
            *(query_start, seq_lens, max(self.seq_lens, default=0), scale, self.sinks, None, self.window),
        )

    def run(self) -> Tensor:
        return mla.mla_attention(*self.arguments())  # type: ignore[arg-type]

    def reference(self) -> Tensor:
        return mla.reference_mla_attention(*self.arguments())  # type: ignore[arg-type]


def make_batch(
    seq_lens: tuple[int, ...],
    query_lens: tuple[int, ...],
    *,
    heads: int = 3,
    sizes: tuple[int, int] = (32, 8),
    block_size: int = 16,
    cache_dtype: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float32,
    sinks: bool = False,
    window: int = 0,
    seed: int = 0,
) -> Batch:
    """Makes a random batch.

    Blocks are in random order.  Unused cache positions hold NaN, and queries are strided, so that reads out
    of bounds change the result.

    Args:
        seq_lens: tokens in the cache, per sequence.
        query_lens: tokens with queries, per sequence; they are the last ones.
        heads: number of query heads.
        sizes: rank of the latents, and size of the rotary part.
        block_size: positions per block.
        cache_dtype: dtype of the cache.
        dtype: dtype of queries and latents before they are stored.
        sinks: with random attention sinks.
        window: positions that a token sees.
        seed: seed of all random values.
    """
    generator = torch.Generator().manual_seed(seed)
    rank, rope_size = sizes
    block_counts = [-(-n // block_size) for n in seq_lens]
    num_blocks = sum(block_counts) + 2
    cache = mla.new_latent_cache(num_blocks, rank, rope_size, block_size, cache_dtype)
    cache.fill_(-1 if cache_dtype == torch.int8 else math.nan)  # scales of bytes −1 are NaN
    order = torch.randperm(num_blocks, generator=generator).to(torch.int32)
    block_table = torch.full((len(seq_lens), max(block_counts, default=0)), -1, dtype=torch.int32)
    for i, (seq_len, count) in enumerate(zip(seq_lens, block_counts, strict=True)):
        block_table[i, :count] = order[sum(block_counts[:i]) : sum(block_counts[: i + 1])]
        position = torch.arange(seq_len)
        slots = block_table[i].long()[position // block_size] * block_size + position % block_size
        latents = torch.randn(seq_len, rank + rope_size, generator=generator).to(dtype)
        mla.mla_write(latents[:, :rank], latents[:, rank:], cache, slots)
    q = torch.randn(sum(query_lens), heads, rank + rope_size, generator=generator).to(dtype)
    logits = 3.0 * torch.randn(heads, generator=generator) if sinks else None
    return Batch(q[..., :rank], q[..., rank:], cache, block_table, seq_lens, query_lens, logits, window)


def check(batch: Batch) -> None:
    """Asserts that every variant matches the reference."""
    expected = batch.reference()
    for name in RUNNABLE:
        with variants.use(name):
            result = batch.run()
        assert result.dtype == batch.q_latent.dtype
        assert result.is_contiguous()
        # bfloat16 dot products round the queries and the attention weights to bfloat16.
        tolerance = max(TOLERANCE[result.dtype], TOLERANCE[batch.cache.dtype])
        torch.testing.assert_close(
            result, expected, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


CASES = {
    "one token": make_batch((1,), (1,)),
    "prompt": make_batch((37,), (37,)),
    "decode over splits": make_batch(
        (600,), (1,), heads=16, cache_dtype=torch.bfloat16, dtype=torch.bfloat16
    ),
    "mixed": make_batch((300, 40, 0, 7), (1, 40, 0, 3), cache_dtype=torch.bfloat16, dtype=torch.bfloat16),
    "chunk": make_batch((330,), (60,), heads=2, block_size=64),
    "one head": make_batch((50,), (5,), heads=1, cache_dtype=torch.float16, dtype=torch.float16),
    "odd sizes": make_batch((70,), (30,), sizes=(33, 7), cache_dtype=torch.bfloat16),
    "odd sizes in float16": make_batch((300,), (2,), sizes=(21, 10), cache_dtype=torch.float16),
    "no rotary part": make_batch((20,), (2,), sizes=(16, 0)),
    "real sizes": make_batch((40,), (2,), heads=20, sizes=(512, 64), cache_dtype=torch.bfloat16),
    "one block per split": make_batch((270,), (12,), block_size=256),
    "sinks": make_batch((600, 40, 3), (1, 40, 3), heads=5, sinks=True),
    "sinks in bfloat16": make_batch((300,), (30,), heads=20, cache_dtype=torch.bfloat16, sinks=True),
    "window": make_batch((300, 9, 40), (7, 9, 1), window=13),
    "window over splits": make_batch(
        (900,), (3,), heads=16, window=500, cache_dtype=torch.bfloat16, dtype=torch.bfloat16
    ),
    "window of one position": make_batch((270,), (270,), window=1, cache_dtype=torch.float16),
    "window of all": make_batch((40,), (40,), window=40, sinks=True),
    "int8": make_batch((300, 40, 0, 7), (1, 40, 0, 3), cache_dtype=torch.int8, sinks=True),
    "one token in int8": make_batch((1,), (1,), cache_dtype=torch.int8),
    "odd sizes in int8": make_batch((70,), (30,), sizes=(33, 7), cache_dtype=torch.int8),
    "no rotary part in int8": make_batch((300,), (2,), sizes=(21, 0), cache_dtype=torch.int8),
    "real sizes in int8": make_batch(
        (540,), (2,), heads=20, sizes=(512, 64), cache_dtype=torch.int8, dtype=torch.bfloat16
    ),
    "window in int8": make_batch((900,), (3,), heads=16, window=500, block_size=64, cache_dtype=torch.int8),
    "many sequences": make_batch((20, 300, 1) * 7, (1, 2, 0) * 7, heads=2),
}


@pytest.mark.parametrize("name", CASES)
def test_matches_reference(name: str) -> None:
    check(CASES[name])


@pytest.mark.parametrize("variant", RUNNABLE)
def test_equals_attention_of_expanded_heads(variant: str) -> None:
    """Compares with attention over keys and values that are expanded from the latents, as in DeepSeek-V2."""
    random = torch.Generator().manual_seed(3)
    heads, rank, rope, nope, value, seq_len = 4, 32, 8, 12, 20, 45
    latent, k_rope = (
        torch.randn(seq_len, rank, generator=random),
        torch.randn(seq_len, rope, generator=random),
    )
    q = torch.randn(seq_len, heads, nope + rope, generator=random)
    w_key = torch.randn(heads, nope, rank, generator=random) / rank**0.5
    w_value = torch.randn(heads, value, rank, generator=random) / rank**0.5
    k = torch.cat(
        [torch.einsum("tr,hnr->thn", latent, w_key), k_rope[:, None].expand(-1, heads, -1)], -1
    ).transpose(0, 1)
    v = torch.einsum("tr,hvr->htv", latent, w_value)
    expected = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True)

    cache = mla.new_latent_cache(3, rank, rope, 16, torch.float32)
    mla.mla_write(latent, k_rope, cache, torch.arange(seq_len))
    q_latent = torch.einsum("thn,hnr->thr", q[..., :nope], w_key)
    block_table = torch.arange(3, dtype=torch.int32)[None]
    query_start, seq_lens = (
        torch.tensor([0, seq_len], dtype=torch.int32),
        torch.tensor([seq_len], dtype=torch.int32),
    )
    with variants.use(variant):
        out = mla.mla_attention(
            q_latent, q[..., nope:], cache, block_table, query_start, seq_lens, seq_len, (nope + rope) ** -0.5
        )
    actual = torch.einsum("thr,hvr->htv", out, w_value)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cache_dtype", CACHES)
@pytest.mark.parametrize(
    ("seq_lens", "query_lens", "heads"),
    [((900, 300) + (17,) * 20, (1, 50) + (1,) * 20, 4), ((129,), (1,), 21)],
)
def test_thread_count_does_not_change_bits(
    cache_dtype: torch.dtype, seq_lens: tuple[int, ...], query_lens: tuple[int, ...], heads: int
) -> None:
    batch = make_batch(seq_lens, query_lens, heads=heads, cache_dtype=cache_dtype)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = batch.run()
        torch.set_num_threads(3)
        assert torch.equal(batch.run(), single)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("variant", RUNNABLE)
def test_positions_before_the_window_are_not_read(variant: str) -> None:
    batch = make_batch((300,), (3,), window=20)
    freed = replace(batch, block_table=batch.block_table.clone())
    freed.block_table[0, : (300 - 3 - 20 + 1) // 16] = -1
    with variants.use(variant):
        assert torch.equal(freed.run(), batch.run())


def test_large_scores_match_reference() -> None:
    batch = make_batch((300,), (2,))
    check(replace(batch, q_latent=batch.q_latent * 1e4))


@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize("cache_dtype", CACHES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_mla_write_matches_reference(variant: str, cache_dtype: torch.dtype, dtype: torch.dtype) -> None:
    wide = torch.randn(19, 70).to(dtype)
    wide[2, 7] = math.nan
    wide[3, 60] = math.inf
    wide[5, :51] = 0.0
    slots = torch.randperm(48)[:19]
    slots[4] = -1
    actual = mla.new_latent_cache(3, 50, 15, 16, cache_dtype)
    expected = actual.clone()
    with variants.use(variant):
        mla.mla_write(wide[:, 1:51], wide[:, 53:68], actual, slots)
    mla.reference_mla_write(wide[:, 1:51], wide[:, 53:68], expected, slots)
    if cache_dtype == torch.int8:  # one NaN is as good as another
        actual, expected = (mla.latents_by_token(x, 50) for x in (actual, expected))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize(("row", "part"), [(11, 0), (13, 1)], ids=["latent", "rotated key"])
def test_int8_rows_that_are_not_finite_affect_tokens_that_see_them(variant: str, row: int, part: int) -> None:
    random = torch.Generator().manual_seed(6)
    cache = mla.new_latent_cache(2, 33, 7, 16, torch.int8)
    parts = [torch.randn(30, size, generator=random) for size in (33, 7)]
    queries = [torch.randn(30, 2, size, generator=random) for size in (33, 7)]
    table, slots = torch.tensor([[1, 0]], dtype=torch.int32), torch.arange(30).add(16) % 32

    def attend(tokens: int) -> Tensor:
        starts, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, tokens], [tokens]))
        return mla.mla_attention(*(q[:tokens] for q in queries), cache, table, starts, lengths, tokens, 0.2)

    with variants.use(variant):
        mla.mla_write(*parts, cache, slots)
        expected = attend(row)
        parts[part][row, 3], parts[part][row, 5] = math.inf, math.nan
        mla.mla_write(*parts, cache, slots)
        assert torch.equal(attend(row), expected)
        assert attend(30)[row:].isnan().all()
        before = cache.clone()
        mla.mla_write(*(x[:0] for x in parts), cache, slots[:0])
    assert torch.equal(cache, before)


@pytest.mark.parametrize("rope_factor", [1.0, 3.0])
def test_int8_latents_error_is_bounded(rope_factor: float) -> None:
    """The error is relative to the output with unrounded latents."""
    random = torch.Generator().manual_seed(4)
    latent, q = torch.randn(300, 512, generator=random), torch.randn(40, 16, 576, generator=random)
    k_rope = rope_factor * torch.randn(300, 64, generator=random)
    table = torch.arange(5, dtype=torch.int32)[None]
    starts, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, 40], [300]))

    def run(cache_dtype: torch.dtype) -> Tensor:
        cache = mla.new_latent_cache(5, 512, 64, 64, cache_dtype)
        mla.mla_write(latent, k_rope, cache, torch.arange(300))
        return mla.mla_attention(*q.split([512, 64], -1), cache, table, starts, lengths, 300, 576**-0.5)

    expected = run(torch.float32)
    errors = {d: float((run(d) - expected).norm() / expected.norm()) for d in (torch.bfloat16, torch.int8)}
    assert errors[torch.int8] < 0.02, errors
    assert errors[torch.bfloat16] < 0.008, errors


def test_int8_rows_keep_the_scales_of_both_parts() -> None:
    generator = torch.Generator().manual_seed(2)
    latent = torch.randn(40, 512, generator=generator)
    k_rope = 50.0 * torch.randn(40, 64, generator=generator)
    cache = mla.new_latent_cache(3, 512, 64, 16, torch.int8)
    assert cache.shape[-1] == 512 + 64 + 8 == mla.latent_width(512 + 64, torch.int8)
    mla.mla_write(latent, k_rope, cache, torch.arange(40))
    rows = mla.latents_by_token(cache, 512).flatten(0, 1)[:40]
    for part, own in zip(rows.split([512, 64], -1), (latent, k_rope), strict=True):
        assert ((part - own).abs().amax(-1) <= own.abs().amax(-1) / 253).all()
