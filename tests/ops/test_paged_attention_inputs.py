"""`paged_attention` and bad inputs: values that are not finite, damaged blocks, shapes that do not fit."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from tests.support.attention_batch import make_batch


def test_blocks_before_the_window_are_not_read() -> None:
    batch = make_batch((600,), (3,), window=40)
    expected = batch.run()
    block_table = batch.block_table.clone()
    block_table[0, : (600 - 3 - 40) // 16] = -1
    assert torch.equal(replace(batch, block_table=block_table).run(), expected)


def test_nan_key_affects_later_tokens_only() -> None:
    batch = make_batch((300,), (300,))
    k_cache = batch.cache.k.clone()
    k_cache[batch.block_table[0, 100 // 16], 0, 0, 100 % 16] = math.nan
    result = replace(batch, cache=batch.cache._replace(k=k_cache)).run()
    assert result[100:].isnan().all()
    assert torch.equal(result[:100], batch.run()[:100])
