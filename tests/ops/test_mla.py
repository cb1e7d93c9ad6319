"""`mla_write` beside its reference, `mla_attention` beside attention of expanded heads, and INT8 latents."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from torch_armllm.ops import mla, variants

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CACHES = (*FLOATS, torch.int8)
RUNNABLE = variants.machine().distinct("attention")


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


def test_other_block_sizes_and_dtypes_of_caches_are_refused() -> None:
    with pytest.raises(ValueError, match="block size 24"):
        mla.new_latent_cache(1, 8, 8, 24, torch.float32)
    with pytest.raises(ValueError, match="int32"):
        mla.new_latent_cache(1, 8, 8, 16, torch.int32)
