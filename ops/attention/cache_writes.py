"""Writes of new keys and values to a paged KV cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_armllm.ops.attention.cache_layout import (
    GROUPS,
    KvCache,
    block_size_of,
    quantize_by_token,
    quantize_int4_by_token,
    rotated,
    rotation_of,
)
from torch_armllm.ops.declare import op, reference


@op()
def kv_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Write new keys and values into the cache.

    Args:
        k: ``(T, kv_heads, head_size)``, float32, bfloat16 or float16.  The tokens may be strided, as
            in a slice of a merged projection.
        v: ``(T, kv_heads, value_size)``; the same dtypes and strides are allowed.
        k_cache: keys, as returned by :func:`new_kv_cache`.  Changed in place; keys are rounded to its dtype.
        v_cache: values, in the same way.
        slots: int64 ``(T,)``: ``block · block_size + offset`` of each token.  A token with a negative slot
            is not written.
        k_scales: float32 ``(blocks, kv_heads, block_size)``, only for int8 and INT4 caches; changed in
            place.
        v_scales: scales of the values, in the same way.

    Raises:
        RuntimeError: shapes or dtypes do not match, or a slot is past the end of the cache.
    """


@reference("kv_write")
def reference_kv_write(a: Any) -> None:
    """Write each token's key and value to its slot; see :func:`torch_armllm.ops.attention.kv_write`."""
    if a.k_cache.dtype == torch.uint8:
        assert a.k_scales is not None and a.v_scales is not None
        _write_int4(a.k, a.v, KvCache(a.k_cache, a.v_cache, a.k_scales, a.v_scales), a.slots)
        return
    dtype, size, group = a.k_cache.dtype, block_size_of(a.k_cache), GROUPS[a.k_cache.dtype]
    padding = (0, -a.k.shape[2] % group)
    keys, values = torch.nn.functional.pad(a.k, padding), a.v
    if a.k_scales is not None and a.v_scales is not None:
        keys, key_scales = quantize_by_token(rotated(keys.float(), rotation_of(keys.shape[-1])))
        values, value_scales = quantize_by_token(values)
    for token, slot in enumerate(a.slots.tolist()):
        if slot < 0:
            continue
        block, offset = divmod(slot, size)
        key, value = keys[token].to(dtype), values[token].to(dtype)
        if group == 1:
            a.k_cache[block, :, :, offset] = key
            a.v_cache[block, :, offset] = value
        else:
            a.k_cache[block, :, :, offset] = key.unflatten(1, (-1, group))
            a.v_cache[block, :, offset // group, :, offset % group] = value
        if a.k_scales is not None and a.v_scales is not None:
            a.k_scales[block, :, offset] = key_scales[token]
            a.v_scales[block, :, offset] = value_scales[token]


def _write_int4(k: Tensor, v: Tensor, cache: KvCache, slots: Tensor) -> None:
    size = block_size_of(cache.k)
    for x, packed, scales, keys in ((k, cache.k, cache.k_scales, True), (v, cache.v, cache.v_scales, False)):
        assert scales is not None
        q, factors, scale = quantize_int4_by_token(x)
        pairs = q.unflatten(-1, (-1, 2, 2, 8) if keys else (-1, 2, 16))
        low, high = pairs.unbind(-2)
        halves = low | high << 4  # (T, heads, groups, 2, 8) of keys, (T, heads, groups, 16) of values
        for token, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            block, at = divmod(slot, size)
            whole = packed[block].flatten(2)
            bytes_ = whole[..., : 16 * size]
            if keys:
                bytes_.unflatten(-1, (2, size, 8))[..., at, :] = halves[token]
            else:
                bytes_.unflatten(-1, (size // 8, 16, 8))[..., at // 8, :, at % 8] = halves[token]
            whole[..., 16 * size :].unflatten(-1, (3, size))[..., at] = factors[token]
            scales[block, :, at] = scale[token]
