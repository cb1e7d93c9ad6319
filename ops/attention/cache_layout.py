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

An int8 cache also has float32 scales of shape ``(blocks, heads, block size)``, for keys and for values.  Head
sizes are padded with zeros to whole groups.  The value of a token and head is its integers times its scale;
its key is rotated, see `rotated`.

An INT4 cache is uint8 and has such scales, too.  Head sizes are multiples of 32, at most 1024.  Keys are
``(blocks, heads, head size / 32, block size, 19)`` and values ``(blocks, heads, value size / 32, block size,
19)``.  Of 32 elements of a token, the largest one is eight bits n, and n · scale; the others are four bits q,
and (q − z) · m · scale with their zero point z of 0 to 15 and multiplier m of 1 to 8.  The order of the bytes
within the last two dimensions is that of `nibbles_as_int8.h`.
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
GROUPS = {torch.float32: 1, torch.float16: 1, torch.bfloat16: 4, torch.int8: 8, torch.uint8: 32}
"""Group size for each cache dtype: dimensions of a key, or positions of values, adjacent in memory.  For INT4
caches (uint8), elements with a common zero point and multiplier."""
SCALED = (torch.int8, torch.uint8)
"""Dtypes of caches with scales."""
NIBBLE_BYTES = 19
"""Bytes of 32 elements in an INT4 cache."""
_MOST_NIBBLE_HEAD = 1024
_MOST_ROTATED = 1024
_MOST_MULTIPLIER, _MOST_NIBBLE, _MOST_INT8 = 8.0, 15.0, 127.0


class KvCache(NamedTuple):
    """Keys and values of one layer, or of several layers in a leading dimension; scales if int8 or uint8."""

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
        raise ValueError(f"cache dtype {dtype} is not one of float32, bfloat16, float16, int8, uint8 (INT4)")
    first = (blocks, kv_heads) if layers is None else (layers, blocks, kv_heads)
    group = GROUPS[dtype]
    if dtype == torch.uint8:
        for size in (head_size, value_size):
            check_int4_size(size)
        packed = (block_size, NIBBLE_BYTES)
        parts = ((*first, size // group, *packed) for size in (head_size, value_size))
        return *parts, (*first, block_size)  # type: ignore[return-value]
    last = (group,) if group > 1 else ()
    keys = (*first, -(-head_size // group), block_size, *last)
    values = (*first, block_size // group, value_size, *last)
    return keys, values, (*first, block_size) if dtype == torch.int8 else None


def check_int4_size(size: int) -> None:
    """Raises ValueError unless keys or values of ``size`` elements can be INT4."""
    if size % GROUPS[torch.uint8] or not 0 < size <= _MOST_NIBBLE_HEAD:
        raise ValueError(
            f"keys and values of {size} elements cannot be INT4, only multiples of 32 up to "
            f"{_MOST_NIBBLE_HEAD}; choose int8"
        )


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
        dtype: float32, bfloat16, float16, int8, or uint8 for INT4.
        layers: size of a leading dimension of all tensors; None for no such dimension.

    Returns:
        Keys and values filled with zeros, in the layout described in this module; scales if int8 or uint8.

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


def value_size_of(v_cache: Tensor) -> int:
    """Elements of a value."""
    return v_cache.shape[2] * GROUPS[torch.uint8] if v_cache.dtype == torch.uint8 else v_cache.shape[3]


def block_size_of(k_cache: Tensor) -> int:
    """Positions per block."""
    return k_cache.shape[3]


def keys_by_token(k_cache: Tensor, scales: Tensor | None = None) -> Tensor:
    """Keys as ``(blocks, kv_heads, block_size, padded head size)``, multiplied by the scales if given."""
    if GROUPS[k_cache.dtype] == 1:
        return k_cache.transpose(2, 3)
    if k_cache.dtype == torch.uint8:
        *first, size, _ = k_cache.shape
        packed, factors = _int4_parts(k_cache)
        pairs = packed.view(*first, 2, size, 8)
        q = torch.stack((pairs & 15, pairs >> 4), -2).movedim(-3, -4).flatten(-3)
        return _int4_by_token(q, factors, scales)
    keys = k_cache.transpose(2, 3).flatten(3)
    if scales is None:
        return keys
    rotation = rotation_of(keys.shape[-1])
    return rotated(keys.float() * scales[..., None], rotation) / rotation


def rotation_of(padded_size: int) -> int:
    """Consecutive elements of an INT8 key that are mixed with each other; 1: the key is not rotated."""
    return padded_size & -padded_size if padded_size <= _MOST_ROTATED else 1


def rotated(x: Tensor, rotation: int) -> Tensor:
    """Multiplies each ``rotation`` elements of the last dimension by a Hadamard matrix of 1 and −1.

    A rotated key has no elements that are much larger than the others, as some models' keys have.  Products
    with equally rotated queries are ``rotation`` times those of the vectors themselves.

    Args:
        x: ``(…, size)`` float32, size a multiple of ``rotation``.
        rotation: a power of two.
    """
    parts: Tensor = x.unflatten(-1, (-1, rotation))  # type: ignore[no-untyped-call]
    for _ in range(rotation.bit_length() - 1):
        first, second = parts.chunk(2, -1)
        parts = torch.stack((first + second, first - second), -1).flatten(-2)
    return parts.flatten(-2)


def values_by_token(v_cache: Tensor, scales: Tensor | None = None) -> Tensor:
    """Values as ``(blocks, kv_heads, block_size, value_size)``, multiplied by the scales if given."""
    if GROUPS[v_cache.dtype] == 1:
        return v_cache
    if v_cache.dtype == torch.uint8:
        *first, size, _ = v_cache.shape
        packed, factors = _int4_parts(v_cache)
        pairs = packed.view(*first, size // 8, 16, 8)
        q = torch.stack((pairs & 15, pairs >> 4), -3).flatten(-3, -2).transpose(-2, -1).flatten(-3, -2)
        return _int4_by_token(q, factors, scales)
    values = v_cache.transpose(3, 4).flatten(2, 3)
    return values if scales is None else values.float() * scales[..., None]


def _int4_parts(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes of q ``(…, groups, 16 · block size)``, and the other ones ``(…, groups, 3, block size)``."""
    size = cache.shape[3]
    whole = cache.flatten(3)
    return whole[..., : 16 * size], whole[..., 16 * size :].unflatten(-1, (3, size))


def _int4_by_token(q: Tensor, factors: Tensor, scales: Tensor | None) -> Tensor:
    """Elements ``(blocks, heads, block size, size)`` of ``q`` (blocks, heads, groups, block size, 32)."""
    factor, number, largest = (part[..., None] for part in factors.unbind(-2))
    integers = (q.to(torch.int8) - (factor & 15).to(torch.int8)) * (factor >> 4).to(torch.int8)
    integers = integers.scatter(-1, number.long() % 32, largest.view(torch.int8))
    integers = integers.transpose(2, 3).flatten(3)
    return integers if scales is None else integers.float() * scales[..., None]


def quantize_int4_by_token(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize to INT4 with a scale per row, and three bytes for each 32 elements.

    A row with a NaN or an infinity gets the scale NaN.

    Args:
        x: ``(…, size)``, any float dtype.

    Returns:
        q of 0 to 15 as uint8 ``(…, size)``; z + 16 m, the number of the largest element and its n as uint8
        ``(…, size / 32, 3)``; and float32 scales ``(…)``.
    """
    groups = x.float().unflatten(-1, (-1, GROUPS[torch.uint8]))
    number = groups.abs().argmax(-1, keepdim=True)
    outlier = groups.gather(-1, number)[..., 0]
    others = groups.scatter(-1, number, 0.0)
    low = others.amin(-1).clamp(max=0.0)
    spread = others.amax(-1).clamp(min=0.0) - low
    most, widest = outlier.abs().amax(-1), spread.amax(-1)
    finite = groups.isfinite().all(-1).all(-1) & widest.isfinite()
    used = finite & (most >= 1e-30)
    # torch multiplies by the inverse of a Python number, which rounds twice
    steps, int8 = (torch.full_like(most, n) for n in (_MOST_MULTIPLIER * _MOST_NIBBLE, _MOST_INT8))
    scale = torch.where(used, torch.maximum(widest / steps, most / int8), torch.ones_like(most))
    inverse = torch.ones_like(scale) / scale
    multipliers = (spread * inverse[..., None] / torch.full_like(spread, _MOST_NIBBLE)).ceil()
    multipliers = multipliers.clamp(1.0, _MOST_MULTIPLIER)
    factor = inverse[..., None] / multipliers
    zeros = (-low * factor).round().clamp(max=_MOST_NIBBLE)
    q = ((groups * factor[..., None]).round() + zeros[..., None]).clamp(0.0, _MOST_NIBBLE)
    largest = (outlier * inverse[..., None]).round()
    q, zeros, largest = (
        torch.where(used.view(*used.shape, *[1] * (t.dim() - used.dim())), t, torch.zeros_like(t))
        for t in (q, zeros, largest)
    )
    multipliers = torch.where(used[..., None], multipliers, torch.ones_like(multipliers))
    number = torch.where(used[..., None], number[..., 0], torch.zeros_like(number[..., 0]))
    bytes_ = ((zeros + 16.0 * multipliers).to(torch.uint8), number.to(torch.uint8))
    factors = torch.stack((*bytes_, largest.to(torch.int8).view(torch.uint8)), -1)
    scale = torch.where(used, scale, torch.zeros_like(scale))
    scale = torch.where(finite, scale, torch.full_like(scale, math.nan))
    return q.to(torch.uint8).flatten(-2), factors, scale


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
