"""`paged_attention` and bad inputs: values that are not finite, damaged blocks, shapes that do not fit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.support.attention_batch import CACHES, RUNNABLE, make_batch
from torch_armllm.ops import attention, variants


def test_blocks_before_the_window_are_not_read() -> None:
    batch = make_batch((600,), (3,), window=40)
    expected = batch.run()
    block_table = batch.block_table.clone()
    block_table[0, : (600 - 3 - 40) // 16] = -1
    assert torch.equal(replace(batch, block_table=block_table).run(), expected)


@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize("cache_dtype", CACHES)
def test_non_finite_factors_of_profiles_affect_their_row_only(variant: str, cache_dtype: torch.dtype) -> None:
    batch = make_batch((60,), (20,), cache_dtype=cache_dtype, extent=9)
    assert batch.relative is not None
    relative = batch.relative.clone()
    relative[3, 0, 2] = math.nan
    relative[4, 1, 0] = math.inf
    with variants.use(variant):
        expected = batch.run()
        result = replace(batch, relative=relative).run()
    assert result[3, 0].isnan().all()
    assert result[4, 1].isnan().any()
    untouched = torch.ones(20, 2, dtype=torch.bool)
    untouched[3, 0] = untouched[4, 1] = False
    assert torch.equal(result[untouched], expected[untouched])


@pytest.mark.parametrize("variant", RUNNABLE)
def test_non_finite_queries_affect_their_row_only(variant: str) -> None:
    batch = make_batch((20,), (20,))
    q = batch.q.clone()
    expected = batch.run()
    q[3, 0, 5] = math.nan
    q[4, 1, 0] = math.inf
    with variants.use(variant):
        result = replace(batch, q=q).run()
    assert result[3, 0].isnan().all()
    assert result[4, 1].isnan().any()
    untouched = torch.ones(20, 2, dtype=torch.bool)
    untouched[3, 0] = untouched[4, 1] = False
    assert torch.equal(result[untouched], expected[untouched])


def test_nan_key_affects_later_tokens_only() -> None:
    batch = make_batch((300,), (300,))
    k_cache = batch.cache.k.clone()
    k_cache[batch.block_table[0, 100 // 16], 0, 0, 100 % 16] = math.nan
    result = replace(batch, cache=batch.cache._replace(k=k_cache)).run()
    assert result[100:].isnan().all()
    assert torch.equal(result[:100], batch.run()[:100])


def test_invalid_arguments_raise() -> None:
    batch = make_batch((30, 20), (4, 1))
    with pytest.raises(ValueError, match="block size 24"):
        attention.new_kv_cache(1, 1, 8, 8, 24, torch.float32)
    with pytest.raises(ValueError, match="int32"):
        attention.new_kv_cache(1, 1, 8, 8, 16, torch.int32)
    small_blocks = batch.cache._replace(k=batch.cache.k[..., :8], v=batch.cache.v[:, :, :8])
    bfloat16 = batch.cache._replace(k=batch.cache.k.bfloat16(), v=batch.cache.v.bfloat16())
    int8 = make_batch((5,), (5,), cache_dtype=torch.int8)
    invalid: list[tuple[dict[str, object], str]] = [
        ({"q": batch.q[:, :, :31]}, "head size 31"),
        ({"q": batch.q[0]}, "tokens, q heads, head size"),
        ({"cache": batch.cache._replace(v=batch.cache.v.bfloat16())}, "same dtype"),
        ({"cache": batch.cache._replace(v=batch.cache.v[:1])}, "does not fit"),
        ({"cache": small_blocks}, "block size 8"),
        ({"cache": bfloat16}, "head size / 4"),
        ({"cache": int8.cache._replace(k_scales=None)}, "needs k_scales"),
        ({"cache": int8.cache._replace(v_scales=int8.cache.v_scales[:, :, :8])}, "v_scales must be"),
        ({"query_lens": (4, 2)}, "number of tokens"),
        ({"seq_lens": (3, 20)}, "seq_lens says 3"),
        ({"seq_lens": (30, 50)}, "needs 4 blocks"),
        ({"block_table": batch.block_table.long()}, "int32"),
        ({"block_table": batch.block_table + 9}, "names block"),
        ({"sinks": torch.zeros(3)}, "sinks"),
        ({"sinks": torch.zeros(4, 2)}, "sinks must be float32"),
        ({"relative": torch.zeros(5, 2, 4)}, "belong together"),
        ({"profiles": torch.zeros(4, 7)}, "belong together"),
        (
            {"relative": torch.zeros(5, 2, 4), "profiles": torch.zeros(3, 7)},
            r"relative must be .*\(5, 2, 3\)",
        ),
        (
            {"relative": torch.zeros(5, 2, 4).half(), "profiles": torch.zeros(4, 7)},
            "relative must be float32",
        ),
        ({"relative": torch.zeros(5, 2, 4), "profiles": torch.zeros(4)}, "rank, extent"),
        ({"relative": torch.zeros(5, 2, 4), "profiles": torch.zeros(4, 0)}, "rank, extent"),
        ({"slopes": torch.zeros(3)}, "alibi_slopes"),
        ({"slopes": torch.zeros(2, dtype=torch.float64)}, "alibi_slopes"),
    ]
    for change, message in invalid:
        with pytest.raises(RuntimeError, match=message):
            replace(batch, **change).run()  # type: ignore[arg-type]
    three_heads = make_batch((5,), (5,), heads=(3, 1))
    doubled = three_heads.cache._replace(
        k=three_heads.cache.k.repeat(1, 2, 1, 1), v=three_heads.cache.v.repeat(1, 2, 1, 1)
    )
    with pytest.raises(RuntimeError, match="multiple"):
        replace(three_heads, cache=doubled).run()
    k, v = torch.zeros(2, 1, 32), torch.zeros(2, 1, 32)
    caches = batch.cache.k, batch.cache.v
    with pytest.raises(RuntimeError, match="slot 99999"):
        attention.kv_write(k, v, *caches, torch.tensor([0, 99999]))
    with pytest.raises(RuntimeError, match="slots must be int64"):
        attention.kv_write(k, v, *caches, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="head size 3 does not fit"):
        attention.kv_write(k[..., :3], v, *caches, torch.arange(2))
    with pytest.raises(RuntimeError, match="k has the shape"):
        attention.kv_write(torch.zeros(2, 2, 32), v, *caches, torch.arange(2))
