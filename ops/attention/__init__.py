"""Attention of packed tokens of many sequences against a paged cache of keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.ops.attention.cache_layout import (
    BLOCK_SIZES,
    GROUPS,
    HUGE_PAGE,
    KvCache,
    keys_by_token,
    kv_cache_shapes,
    new_kv_cache,
    values_by_token,
)
from torch_armllm.ops.attention.reference import reference_kv_write, reference_paged_attention

__all__ = [
    "BLOCK_SIZES",
    "GROUPS",
    "HUGE_PAGE",
    "KvCache",
    "keys_by_token",
    "kv_cache_shapes",
    "kv_write",
    "new_kv_cache",
    "paged_attention",
    "reference_kv_write",
    "reference_paged_attention",
    "values_by_token",
]


def kv_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Writes new keys and values into the cache.

    Args:
        k: ``(T, kv_heads, head_size)``, float32, bfloat16 or float16; tokens may lie apart, as in a
            slice of a merged projection.
        v: ``(T, kv_heads, value_size)``, the same.
        k_cache: as :func:`new_kv_cache` makes it; changed in place, rounded to its dtype.
        v_cache: the same.
        slots: int64 ``(T,)``: ``block · block_size + offset`` of each token; negative: not written.
        k_scales: float32 ``(blocks, kv_heads, block_size)`` of an int8 cache; changed in place.
        v_scales: the same.

    Raises:
        RuntimeError: shapes or dtypes do not fit, or a slot lies past the cache.
    """
    torch.ops.armllm.kv_write(k, v, k_cache, v_cache, slots, k_scales, v_scales)


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
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    """Causal softmax attention of the last tokens of each sequence on all that the cache holds of it.

    Sequences may be mixed freely: whole prompts, chunks of prompts and single new tokens.  The keys and
    values of the new tokens must be in the cache already (:func:`kv_write`).

    Args:
        q: ``(T, q_heads, head_size)``, float32, bfloat16 or float16; rows may lie apart.  ``q_heads`` is a
            multiple of ``kv_heads``.
        k_cache: as :func:`new_kv_cache` makes it; so the others.
        v_cache: float32, float16, bfloat16 or int8.
        block_table: int32 ``(B, ≥ blocks a sequence)``, the cache blocks of each sequence in order.  Entries
            wholly before the window are not read.
        query_start: int32 ``(B + 1,)``, the first packed token of each sequence; it ends with ``T``.
        seq_lens: int32 ``(B,)``, positions of each sequence in the cache, the new tokens included.
        max_seq_len: at least the largest of them.
        scale: factor of the scores.
        window: greater than 0: a query at position p sees positions p − window + 1 … p only.
        softcap: greater than 0: scores become ``softcap · tanh(score / softcap)``.
        sinks: float32 ``(q_heads,)``, logits that take part in the softmax and carry no value.
        k_scales: float32 ``(blocks, kv_heads, block_size)``, of int8 caches.
        v_scales: the same.

    Returns:
        ``(T, q_heads, value_size)`` in the dtype of ``q``, contiguous.  A token's result has the same bits
        alone, in a chunk or in a batch, on any number of threads; with float32 and float16 caches with every
        kernel variant as well.

    Raises:
        RuntimeError: shapes, dtypes, lengths or block numbers do not fit; the message names the value.

    Source: PagedAttention (arXiv 2309.06180); splits merged by an online softmax as in FlashDecoding.
    """
    result: Tensor = torch.ops.armllm.paged_attention(
        *(q, k_cache, v_cache, block_table, query_start, seq_lens, max_seq_len, scale, window, softcap),
        *(sinks, k_scales, v_scales),
    )
    return result


@torch.library.register_fake("armllm::kv_write")
def _kv_write_fake(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
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
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v_cache.shape[3])
