"""`kv_write` against its reference, and the memory of KV caches."""

from __future__ import annotations

import math

import pytest
import torch

from torch_armllm.ops import attention, variants

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
VARIANTS = variants.machine().distinct("attention")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cache_dtype", [*FLOATS, torch.int8])
@pytest.mark.parametrize("dtype", FLOATS)
def test_kv_write_matches_reference(variant: str, cache_dtype: torch.dtype, dtype: torch.dtype) -> None:
    wide = torch.randn(19, 200).to(dtype)
    wide[2, 7] = math.nan
    wide[3, 90] = math.inf
    wide[5] = 0.0
    k, v = wide[:, 1:101].unflatten(1, (2, 50)), wide[:, 101:143].unflatten(1, (2, 21))
    slots = torch.randperm(48)[:19]
    slots[4] = -1
    actual, expected = (attention.new_kv_cache(3, 2, 50, 21, 16, cache_dtype) for _ in range(2))
    with variants.use(variant):
        attention.kv_write(k, v, actual.k, actual.v, slots, actual.k_scales, actual.v_scales)
    attention.reference_kv_write(k, v, expected.k, expected.v, slots, expected.k_scales, expected.v_scales)
    for tensor, reference_tensor in zip(actual, expected, strict=True):
        if tensor is None or reference_tensor is None:
            continue
        torch.testing.assert_close(tensor, reference_tensor, rtol=0, atol=0, equal_nan=True)


def test_large_cache_is_zeroed_and_outlives_its_first_tensor() -> None:
    keys, values, *_ = attention.new_kv_cache(40, 2, 256, 128, 64, torch.float16)
    assert keys.nbytes > attention.HUGE_PAGE
    assert keys.shape == (40, 2, 256, 64)
    assert values.shape == (40, 2, 64, 128)
    assert not keys.any()
    last = keys[-1]
    last.fill_(3.0)
    del keys
    assert (last == 3.0).all()
