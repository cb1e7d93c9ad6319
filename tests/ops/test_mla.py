"""mla_write and mla_attention against their references and expanded heads, and the promise of equal bits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_armllm.ops import attention, mla, variants

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
if "dotprod" in variants.machine().runnable:
    TOLERANCE[torch.float16] = 5e-3  # Arm CPUs sum 32 products in float16
RUNNABLE = variants.machine().distinct("attention")


@dataclass(frozen=True)
class Batch:
    """Sequences in a latent cache, and the queries of their last tokens."""

    q_latent: Tensor
    q_rope: Tensor
    cache: Tensor
    table: Tensor
    lengths: tuple[int, ...]
    new: tuple[int, ...]

    def arguments(self) -> tuple[Tensor | int | float, ...]:
        start = torch.tensor([sum(self.new[:i]) for i in range(len(self.new) + 1)], dtype=torch.int32)
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        longest = max(self.lengths, default=0)
        scale = 1.0 / math.sqrt(self.cache.shape[-1])
        return (self.q_latent, self.q_rope, self.cache, self.table, start, lengths, longest, scale)

    def run(self) -> Tensor:
        return mla.mla_attention(*self.arguments())  # type: ignore[arg-type]

    def reference(self) -> Tensor:
        return mla.reference_mla_attention(*self.arguments())  # type: ignore[arg-type]

    def only(self, sequence: int, token: int | None = None) -> Batch:
        """One sequence alone, or one of its new tokens as a decode step that ends there."""
        first, new, length = sum(self.new[:sequence]), self.new[sequence], self.lengths[sequence]
        tokens = slice(first, first + new)
        if token is not None:
            tokens, length, new = slice(first + token, first + token + 1), length - new + token + 1, 1
        table = self.table[sequence : sequence + 1]
        queries = {"q_latent": self.q_latent[tokens], "q_rope": self.q_rope[tokens]}
        return replace(self, table=table, lengths=(length,), new=(new,), **queries)


def make_batch(
    lengths: tuple[int, ...],
    new: tuple[int, ...],
    *,
    heads: int = 3,
    sizes: tuple[int, int] = (32, 8),
    block: int = 16,
    cache: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Batch:
    """Blocks in random order, NaN wherever nothing was written, queries slices of one wider tensor."""
    random = torch.Generator().manual_seed(seed)
    rank, rope = sizes
    counts = [-(-n // block) for n in lengths]
    blocks = sum(counts) + 2
    latents = mla.new_latent_cache(blocks, rank, rope, block, cache)
    latents.fill_(math.nan)
    order = torch.randperm(blocks, generator=random).to(torch.int32)
    table = torch.full((len(lengths), max(counts, default=0)), -1, dtype=torch.int32)
    for i, count in enumerate(counts):
        table[i, :count] = order[sum(counts[:i]) : sum(counts[: i + 1])]
        position = torch.arange(lengths[i])
        slots = table[i].long()[position // block] * block + position % block
        both = torch.randn(lengths[i], rank + rope, generator=random).to(dtype)
        mla.mla_write(both[:, :rank], both[:, rank:], latents, slots)
    q = torch.randn(sum(new), heads, rank + rope, generator=random).to(dtype)
    return Batch(q[..., :rank], q[..., rank:], latents, table, lengths, new)


def check(batch: Batch) -> None:
    """Every variant gives the reference's values."""
    expected = batch.reference()
    for name in RUNNABLE:
        with variants.use(name):
            result = batch.run()
        assert result.dtype == batch.q_latent.dtype
        assert result.is_contiguous()
        # Products of bfloat16 round the queries and the weights to it.
        error = max(TOLERANCE[result.dtype], TOLERANCE[batch.cache.dtype])
        torch.testing.assert_close(
            result, expected, rtol=error, atol=error, msg=lambda m, n=name: f"{n}: {m}"
        )


CASES = {
    "one token": make_batch((1,), (1,)),
    "prompt": make_batch((37,), (37,)),
    "decode over splits": make_batch((600,), (1,), heads=16, cache=torch.bfloat16, dtype=torch.bfloat16),
    "mixed": make_batch((300, 40, 0, 7), (1, 40, 0, 3), cache=torch.bfloat16, dtype=torch.bfloat16),
    "chunk": make_batch((330,), (60,), heads=2, block=64),
    "one head": make_batch((50,), (5,), heads=1, cache=torch.float16, dtype=torch.float16),
    "odd sizes": make_batch((70,), (30,), sizes=(33, 7), cache=torch.bfloat16),
    "odd sizes in float16": make_batch((300,), (2,), sizes=(21, 10), cache=torch.float16),
    "no rotary part": make_batch((20,), (2,), sizes=(16, 0)),
    "real sizes": make_batch((40,), (2,), heads=20, sizes=(512, 64), cache=torch.bfloat16),
    "one block a split": make_batch((270,), (12,), block=256),
    "many sequences": make_batch((20, 300, 1) * 7, (1, 2, 0) * 7, heads=2),
}


@pytest.mark.parametrize("name", CASES)
def test_matches_reference(name: str) -> None:
    check(CASES[name])


@pytest.mark.parametrize("cache", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_dtype_matches_reference(cache: torch.dtype, dtype: torch.dtype) -> None:
    check(make_batch((30, 20), (22, 1), heads=2, cache=cache, dtype=dtype))


@settings(max_examples=15, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 290), st.integers(0, 20)), max_size=3),
    heads=st.integers(1, 20),
    sizes=st.tuples(st.integers(1, 70), st.integers(0, 30)),
    block=st.sampled_from(attention.BLOCK_SIZES),
    cache=st.sampled_from(FLOATS),
    seed=st.integers(0, 99),
)
def test_random_shapes_match_reference(
    sequences: list[tuple[int, int]],
    heads: int,
    sizes: tuple[int, int],
    block: int,
    cache: torch.dtype,
    seed: int,
) -> None:
    new = tuple(n for _, n in sequences)
    lengths = tuple(before + n for before, n in sequences)
    check(make_batch(lengths, new, heads=heads, sizes=sizes, block=block, cache=cache, seed=seed))


@pytest.mark.parametrize("variant", RUNNABLE)
def test_equals_attention_of_expanded_heads(variant: str) -> None:
    """Keys and values projected up from the latents, as DeepSeek-V2 defines its attention."""
    random = torch.Generator().manual_seed(3)
    heads, rank, rope, nope, value, length = 4, 32, 8, 12, 20, 45
    latent, k_rope = torch.randn(length, rank, generator=random), torch.randn(length, rope, generator=random)
    q = torch.randn(length, heads, nope + rope, generator=random)
    w_key = torch.randn(heads, nope, rank, generator=random) / rank**0.5
    w_value = torch.randn(heads, value, rank, generator=random) / rank**0.5
    k = torch.cat(
        [torch.einsum("tr,hnr->thn", latent, w_key), k_rope[:, None].expand(-1, heads, -1)], -1
    ).transpose(0, 1)
    v = torch.einsum("tr,hvr->htv", latent, w_value)
    expected = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True)

    cache = mla.new_latent_cache(3, rank, rope, 16, torch.float32)
    mla.mla_write(latent, k_rope, cache, torch.arange(length))
    q_latent = torch.einsum("thn,hnr->thr", q[..., :nope], w_key)
    table = torch.arange(3, dtype=torch.int32)[None]
    start, lengths = torch.tensor([0, length], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    with variants.use(variant):
        out = mla.mla_attention(
            q_latent, q[..., nope:], cache, table, start, lengths, length, (nope + rope) ** -0.5
        )
    found = torch.einsum("thr,hvr->htv", out, w_value)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize("cache", FLOATS)
def test_batch_and_chunking_do_not_change_bits(variant: str, cache: torch.dtype) -> None:
    new = (60, 40, 1, 2)
    batch = make_batch((290, 40, 540, 5), new, heads=5, cache=cache, dtype=torch.bfloat16)
    with variants.use(variant):
        together = batch.run().split(new)
        for sequence, count in enumerate(new):
            assert torch.equal(batch.only(sequence).run(), together[sequence])
            for token in {0, count // 2, count - 1}:
                assert torch.equal(batch.only(sequence, token).run()[0], together[sequence][token])


@pytest.mark.parametrize("cache", FLOATS)
@pytest.mark.parametrize(
    ("lengths", "new", "heads"), [((900, 300) + (17,) * 20, (1, 50) + (1,) * 20, 4), ((129,), (1,), 21)]
)
def test_thread_count_does_not_change_bits(
    cache: torch.dtype, lengths: tuple[int, ...], new: tuple[int, ...], heads: int
) -> None:
    batch = make_batch(lengths, new, heads=heads, cache=cache)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = batch.run()
        torch.set_num_threads(3)
        assert torch.equal(batch.run(), alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("variant", RUNNABLE)
def test_non_finite_queries_affect_their_row_only(variant: str) -> None:
    batch = make_batch((20,), (20,), heads=2)
    q = batch.q_latent.clone()
    q[3, 0, 5] = math.nan
    q[4, 1, 0] = math.inf
    with variants.use(variant):
        expected = batch.run()
        result = replace(batch, q_latent=q).run()
    assert result[3, 0].isnan().all()
    assert result[4, 1].isnan().any()
    untouched = torch.ones(20, 2, dtype=torch.bool)
    untouched[3, 0] = untouched[4, 1] = False
    assert torch.equal(result[untouched], expected[untouched])


def test_large_scores_match_reference() -> None:
    batch = make_batch((300,), (2,))
    check(replace(batch, q_latent=batch.q_latent * 1e4))


def test_empty_batch_returns_empty() -> None:
    assert make_batch((), ()).run().shape == (0, 3, 32)
    assert make_batch((5, 0), (0, 0)).run().shape == (0, 3, 32)


@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize("cache", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_mla_write_matches_reference(variant: str, cache: torch.dtype, dtype: torch.dtype) -> None:
    wide = torch.randn(19, 70).to(dtype)
    wide[2, 7] = math.nan
    wide[3, 60] = math.inf
    slots = torch.randperm(48)[:19]
    slots[4] = -1
    found = mla.new_latent_cache(3, 50, 15, 16, cache)
    expected = found.clone()
    with variants.use(variant):
        mla.mla_write(wide[:, 1:51], wide[:, 53:68], found, slots)
    mla.reference_mla_write(wide[:, 1:51], wide[:, 53:68], expected, slots)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_opcheck() -> None:
    batch = make_batch((30, 20), (4, 1))
    torch.library.opcheck(torch.ops.armllm.mla_attention, batch.arguments())
    cache = mla.new_latent_cache(2, 32, 8, 16, torch.bfloat16)
    torch.library.opcheck(
        torch.ops.armllm.mla_write, (torch.randn(3, 32), torch.randn(3, 8), cache, torch.arange(3))
    )


def test_invalid_arguments_raise() -> None:
    batch = make_batch((30, 20), (4, 1))
    with pytest.raises(ValueError, match="block size 24"):
        mla.new_latent_cache(1, 8, 8, 24, torch.float32)
    with pytest.raises(ValueError, match="int32"):
        mla.new_latent_cache(1, 8, 8, 16, torch.int32)
    wrong: list[tuple[dict[str, object], str]] = [
        ({"q_latent": batch.q_latent[:, :, :31]}, r"rank \+ rope size of q_latent and q_rope is 39"),
        ({"q_latent": batch.q_latent[0]}, "tokens, heads, rank"),
        ({"q_latent": batch.q_latent[:, :2]}, "q_rope has the shape"),
        ({"q_rope": batch.q_rope[:3]}, "q_rope has the shape"),
        ({"q_rope": batch.q_rope.half()}, "dtype of q_latent"),
        ({"cache": batch.cache[:, :8]}, "block size 8"),
        ({"cache": batch.cache[0]}, "blocks, block size, rank"),
        ({"cache": batch.cache.transpose(0, 1).contiguous().transpose(0, 1)}, "contiguous"),
        ({"cache": batch.cache.long()}, "float32, bfloat16"),
        ({"new": (4, 2)}, "number of tokens"),
        ({"lengths": (3, 20)}, "seq_lens says 3"),
        ({"lengths": (30, 50)}, "needs 4 blocks"),
        ({"table": batch.table.long()}, "int32"),
        ({"table": batch.table + 9}, "names block"),
        ({"table": batch.table - 9}, "names block -"),
    ]
    for change, message in wrong:
        with pytest.raises(RuntimeError, match=message):
            replace(batch, **change).run()  # type: ignore[arg-type]
    latent, k_rope, cache = torch.zeros(2, 32), torch.zeros(2, 8), batch.cache
    with pytest.raises(RuntimeError, match="slot 99999 of token 1"):
        mla.mla_write(latent, k_rope, cache, torch.tensor([0, 99999]))
    with pytest.raises(RuntimeError, match="slots must be int64"):
        mla.mla_write(latent, k_rope, cache, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="latent and k_rope are 32 and 7 wide"):
        mla.mla_write(latent, k_rope[:, :7], cache, torch.arange(2))
    with pytest.raises(RuntimeError, match="k_rope has the shape"):
        mla.mla_write(latent, k_rope[:1], cache, torch.arange(2))
