"""Memory layout of keys and values in a paged cache.

A register loaded from the cache is an operand of the CPU's widest dot product for the cache's dtype:

=================  =========================================  ===========================================
dtype              keys                                       values
=================  =========================================  ===========================================
float32, float16   (blocks, heads, head size, block size)     (blocks, heads, block size, value size)
bfloat16           (blocks, heads, head size / 4,             (blocks, heads, block size / 4,
                   block size, 4)                             value size, 4)
int8               (blocks, heads, head size / 8,             (blocks, heads, block size / 8,
                   block size, 8)                             value size, 8)
=================  =========================================  ===========================================

An int8 cache also has float32 scales of shape ``(blocks, heads, block size)``, for keys and for values.  The
key of a token and head is its integers times its scale.  Head sizes are padded with zeros to whole groups.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_SIZES = (16, 32, 64, 128, 256)
"""Allowed numbers of positions per cache block."""
HUGE_PAGE = 1 << 21
"""Bytes of a huge page.  Tensors smaller than this are allocated in ordinary memory."""
GROUPS = {torch.float32: 1, torch.float16: 1, torch.bfloat16: 4, torch.int8: 8}
"""Group size for each cache dtype: dimensions of a key, or positions of values, adjacent in memory."""


class KvCache(NamedTuple):
    """Keys and values of one layer, or of several layers in a leading dimension; scales if int8."""

    k: Tensor
    v: Tensor
    k_scales: Tensor | None
    v_scales: Tensor | None


def zeros_on_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate zeros, on huge pages where the system has them.

    Cache blocks are read in no fixed order, so with small pages nearly every block costs a page-table walk.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the operating system has no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def kv_cache_shapes(
    blocks: int,
    kv_heads: int,
    head_size: int,
    value_size: int,
    block_size: int,
    dtype: torch.dtype,
    layers: int | None = None,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]:
    """Shapes of the keys, values and scales of :func:`new_kv_cache`; the last is None without scales."""
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block size {block_size} is not one of {', '.join(map(str, BLOCK_SIZES))}")
    if dtype not in GROUPS:
        raise ValueError(f"cache dtype {dtype} is not one of float32, bfloat16, float16, int8")
    first = (blocks, kv_heads) if layers is None else (layers, blocks, kv_heads)
    group = GROUPS[dtype]
    last = (group,) if group > 1 else ()
    keys = (*first, -(-head_size // group), block_size, *last)
    values = (*first, block_size // group, value_size, *last)
    return keys, values, (*first, block_size) if dtype == torch.int8 else None


def new_kv_cache(
    blocks: int,
    kv_heads: int,
    head_size: int,
    value_size: int,
    block_size: int,
    dtype: torch.dtype,
    layers: int | None = None,
) -> KvCache:
    """Allocate the caches of one layer, or of several, in the kernels' layout.

    Args:
        blocks: number of blocks.
        kv_heads: number of heads of keys and values.
        head_size: elements of a key.
        value_size: elements of a value.
        block_size: positions per block, one of :data:`BLOCK_SIZES`.
        dtype: float32, bfloat16, float16 or int8.
        layers: size of a leading dimension of all tensors; None for no such dimension.

    Returns:
        Keys and values filled with zeros, and scales if int8, in the layout described in this module.

    Raises:
        ValueError: the block size or dtype is not supported.
    """
    keys, values, scales = kv_cache_shapes(blocks, kv_heads, head_size, value_size, block_size, dtype, layers)
    k_scales, v_scales = (
        None if scales is None else zeros_on_huge_pages(scales, torch.float32) for _ in range(2)
    )
    return KvCache(zeros_on_huge_pages(keys, dtype), zeros_on_huge_pages(values, dtype), k_scales, v_scales)


def head_size_of(k_cache: Tensor) -> int:
    """Elements of a key, including padding."""
    return k_cache.shape[2] * GROUPS[k_cache.dtype]


def block_size_of(k_cache: Tensor) -> int:
    """Positions per block."""
    return k_cache.shape[3]


def keys_by_token(k_cache: Tensor, scales: Tensor | None = None) -> Tensor:
    """Keys as ``(blocks, kv_heads, block_size, padded head size)``, multiplied by the scales if given."""
    if GROUPS[k_cache.dtype] == 1:
        return k_cache.transpose(2, 3)
    keys = k_cache.transpose(2, 3).flatten(3)
    return keys if scales is None else keys.float() * scales[..., None]


def values_by_token(v_cache: Tensor, scales: Tensor | None = None) -> Tensor:
    """Values as ``(blocks, kv_heads, block_size, value_size)``, multiplied by the scales if given."""
    if GROUPS[v_cache.dtype] == 1:
        return v_cache
    values = v_cache.transpose(3, 4).flatten(2, 3)
    return values if scales is None else values.float() * scales[..., None]


def quantize_by_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to INT8 with one scale per row of the last dimension.

    A row with a NaN or an infinity gets the scale NaN.

    Args:
        x: ``(…, size)``, any float dtype.

    Returns:
        int8 ``(…, size)``, and float32 scales ``(…)``: the largest magnitude of a row / 127.
    """
    wide = x.float()
    top = wide.abs().amax(-1)
    finite = wide.isfinite().all(-1)
    used = finite & (top >= 1e-30)
    most = torch.full_like(top, 127.0)  # torch computes 127.0 / top as 127.0 · (1 / top), which rounds twice
    inverse = torch.where(used, most / top, 0.0)
    q = torch.where(used[..., None], wide * inverse[..., None], 0.0).round().to(torch.int8)
    scale = torch.where(used, top / most, torch.zeros_like(top))
    return q, torch.where(finite, scale, torch.full_like(scale, math.nan))
