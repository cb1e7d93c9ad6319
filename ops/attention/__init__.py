"""Attention of packed tokens of many sequences against a paged cache of keys and values."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch
from torch import Tensor

from torch_armllm.ops.attention.reference import reference_kv_write, reference_paged_attention

__all__ = [
    "BLOCK_SIZES",
    "kv_write",
    "new_cache",
    "paged_attention",
    "reference_kv_write",
    "reference_paged_attention",
]

BLOCK_SIZES = (16, 32, 64, 128, 256)
"""Positions a cache block may hold."""
HUGE_PAGE = 1 << 21
"""Bytes; smaller caches take ordinary memory."""


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros, on huge pages where the system has them: blocks lie anywhere, and each small page is a walk."""
    size = math.prod(shape) * dtype.itemsize
    if size < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def new_cache(
    blocks: int, kv_heads: int, head_size: int, value_size: int, block_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Empty caches of one layer in the kernels' layout.

    Args:
        blocks: number of blocks.
        kv_heads: heads of keys and values.
        head_size: elements of a key.
        value_size: elements of a value.
        block_size: positions a block, one of :data:`BLOCK_SIZES`.
        dtype: float32, bfloat16 or float16.

    Returns:
        Keys ``(blocks, kv_heads, head_size, block_size)`` and values
        ``(blocks, kv_heads, block_size, value_size)``, zeros.

    Raises:
        ValueError: the block size or dtype is none of those.
    """
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block size {block_size} is not one of {', '.join(map(str, BLOCK_SIZES))}")
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"cache dtype {dtype} is not one of float32, bfloat16, float16")
    keys = _zeros((blocks, kv_heads, head_size, block_size), dtype)
    return keys, _zeros((blocks, kv_heads, block_size, value_size), dtype)


def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Writes new keys and values into the cache.

    Args:
        k: ``(T, kv_heads, head_size)``, float32, bfloat16 or float16; tokens may lie apart, as in a
            slice of a merged projection.
        v: ``(T, kv_heads, value_size)``, the same.
        k_cache: as :func:`new_cache` makes it; changed in place, rounded to its dtype.
        v_cache: the same.
        slots: int64 ``(T,)``: ``block · block_size + offset`` of each token; negative: not written.

    Raises:
        RuntimeError: shapes or dtypes do not fit, or a slot lies past the cache.
    """
    torch.ops.armllm.kv_write(k, v, k_cache, v_cache, slots)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal softmax attention of the last tokens of each sequence on all that the cache holds of it.

    Sequences may be mixed freely: whole prompts, chunks of prompts and single new tokens.  The keys and
    values of the new tokens must be in the cache already (:func:`kv_write`).

    Args:
        q: ``(T, q_heads, head_size)``, float32, bfloat16 or float16; rows may lie apart.  ``q_heads`` is a
            multiple of ``kv_heads``.
        k_cache: ``(blocks, kv_heads, head_size, block_size)``.
        v_cache: ``(blocks, kv_heads, block_size, value_size)``.
        block_table: int32 ``(B, ≥ blocks a sequence)``, the cache blocks of each sequence in order.  Entries
            wholly before the window are not read.
        query_start: int32 ``(B + 1,)``, the first packed token of each sequence; it ends with ``T``.
        seq_lens: int32 ``(B,)``, positions of each sequence in the cache, the new tokens included.
        max_seq_len: at least the largest of them.
        scale: factor of the scores.
        window: greater than 0: a query at position p sees positions p − window + 1 … p only.
        softcap: greater than 0: scores become ``softcap · tanh(score / softcap)``.
        sinks: float32 ``(q_heads,)``, logits that take part in the softmax and carry no value.

    Returns:
        ``(T, q_heads, value_size)`` in the dtype of ``q``, contiguous.  A token's result has the same bits
        alone, in a chunk or in a batch, with every kernel variant and number of threads.

    Raises:
        RuntimeError: shapes, dtypes, lengths or block numbers do not fit; the message names the value.

    Source: PagedAttention (arXiv 2309.06180); splits merged by an online softmax as in FlashDecoding.
    """
    result: Tensor = torch.ops.armllm.paged_attention(
        q, k_cache, v_cache, block_table, query_start, seq_lens, max_seq_len, scale, window, softcap, sinks
    )
    return result


@torch.library.register_fake("armllm::kv_write")
def _kv_write_fake(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    return None


@torch.library.register_fake("armllm::paged_attention")
def _paged_attention_fake(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v_cache.shape[3])
