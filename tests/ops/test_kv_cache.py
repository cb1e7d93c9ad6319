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


@pytest.mark.parametrize("size", [8, 33, 64, 80, 96, 128, 256, 1024, 1032])
def test_int8_key_is_near_the_key_beside_a_large_element(size: int) -> None:
    k = torch.randn(16, 1, size)
    k[:, :, 3] = 100.0
    cache = attention.new_kv_cache(1, 1, size, 8, 16, torch.int8)
    attention.kv_write(k, k[..., :8], cache.k, cache.v, torch.arange(16), cache.k_scales, cache.v_scales)
    written = attention.keys_by_token(cache.k, cache.k_scales)[0, 0, :, :size]
    others = [i for i in range(size) if i != 3]
    error = (written - k[:, 0])[:, others].norm() / k[:, 0, others].norm()
    mixed = attention.rotation_of(size + -size % 8) ** 0.5
    step = (100.0 + 5.0 * mixed) / 127.0  # of a rotated key; rotated back, its rounding is divided by √n
    assert error < 0.33 * step / mixed


@pytest.mark.parametrize("rotation", [1, 8, 16, 128])
def test_rotated_keys_and_queries_have_the_same_products(rotation: int) -> None:
    q, k = torch.randint(-9, 9, (2, 5, 3 * rotation)).float()
    products = attention.rotated(q, rotation) @ attention.rotated(k, rotation).T
    torch.testing.assert_close(products, rotation * q @ k.T, rtol=0, atol=0)
    if rotation == 8:
        signs = attention.rotated(torch.eye(8), 8)
        assert signs.abs().eq(1).all() and signs.eq(signs.T).all() and signs[0].eq(1).all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sizes", [(64, 32), (96, 192), (128, 256), (32, 1024)])
def test_int4_write_matches_reference(variant: str, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    keys, values = sizes
    k, v = (torch.randn(19, 2, size).to(dtype) * 3 for size in sizes)
    k[2, 1, 7] = math.nan
    v[3, 0, 9] = math.inf
    k[5] = 0.0
    v[6] = 1e-38
    k[7] = k[7].abs()  # zero points at the ends
    k[8, :, ::5] *= 100.0  # several outliers in a group
    k[10] = 2.0  # all equal
    v[8] = -v[8].abs()
    v[9, 0, 3] = 1000.0
    slots = torch.randperm(64)[:19]
    slots[4] = -1
    actual, expected = (attention.new_kv_cache(2, 2, keys, values, 32, torch.uint8) for _ in range(2))
    with variants.use(variant):
        attention.kv_write(k, v, actual.k, actual.v, slots, actual.k_scales, actual.v_scales)
    attention.reference_kv_write(k, v, expected.k, expected.v, slots, expected.k_scales, expected.v_scales)
    for tensor, reference_tensor in zip(actual, expected, strict=True):
        assert tensor is not None and reference_tensor is not None
        torch.testing.assert_close(tensor, reference_tensor, rtol=0, atol=0, equal_nan=True)
    written = attention.keys_by_token(actual.k, actual.k_scales)[slots[0] // 32, :, slots[0] % 32]
    assert (written - k[0].float()).norm() < 0.09 * k[0].float().norm()
    written = attention.values_by_token(actual.v, actual.v_scales)[slots[0] // 32, :, slots[0] % 32]
    assert (written - v[0].float()).norm() < 0.09 * v[0].float().norm()


@pytest.mark.parametrize("sizes", [(48, 32), (32, 20), (32, 1056)])
def test_int4_needs_whole_groups(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="choose int8"):
        attention.new_kv_cache(2, 2, *sizes, 32, torch.uint8)


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
