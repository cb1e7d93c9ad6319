"""Attention of packed tokens from many sequences over a paged KV cache."""

from __future__ import annotations

from torch import Tensor

from torch_armllm.ops.attention.cache_layout import (
    BLOCK_SIZES,
    GROUPS,
    HUGE_PAGE,
    SCALED,
    KvCache,
    check_int4_size,
    keys_by_token,
    kv_cache_shapes,
    new_kv_cache,
    rotated,
    rotation_of,
    value_size_of,
    values_by_token,
)
from torch_armllm.ops.attention.chosen_blocks import block_attention, reference_block_attention
from torch_armllm.ops.attention.reference import reference_kv_write, reference_paged_attention
from torch_armllm.ops.declare import op

__all__ = [
    "BLOCK_SIZES",
    "GROUPS",
    "HUGE_PAGE",
    "SCALED",
    "KvCache",
    "block_attention",
    "check_int4_size",
    "keys_by_token",
    "rotated",
    "rotation_of",
    "kv_cache_shapes",
    "kv_write",
    "new_kv_cache",
    "paged_attention",
    "reference_block_attention",
    "reference_kv_write",
    "reference_paged_attention",
    "value_size_of",
    "values_by_token",
]


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


@op(lambda a: a.q.new_empty(a.q.shape[0], a.q.shape[1], value_size_of(a.v_cache)))
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
    alibi_slopes: Tensor | None = None,
    relative: Tensor | None = None,
    profiles: Tensor | None = None,
    ahead: int = 0,
    biases: Tensor | None = None,
    later: Tensor | None = None,
    group_size: int = 0,
    skipped_heads: int = 0,
) -> Tensor:
    """Softmax attention of the new tokens of each sequence over its cached keys and values.

    A batch may mix whole prompts, chunks of prompts and single new tokens.  Write the keys and values of the
    new tokens to the cache first (:func:`kv_write`).  Attention is causal, unless tokens look ``ahead``.

    Args:
        q: ``(T, q_heads, head_size)``, float32, bfloat16 or float16; the tokens may be strided.  ``q_heads``
            must be a multiple of ``kv_heads``, unless ranks share out groups.
        k_cache: keys, as returned by :func:`new_kv_cache`: float32, float16, bfloat16, int8 or uint8 (INT4).
        v_cache: values, of the same dtype.
        block_table: int32 ``(B, blocks)``: the cache blocks of each sequence in order, with at least as many
            columns as the longest sequence has blocks.  Blocks that end before the window are not read.
        query_start: int32 ``(B + 1,)``: the first packed token of each sequence, then ``T``.
        seq_lens: int32 ``(B,)``: length of each sequence in the cache, including the new tokens.
        max_seq_len: an upper bound of ``seq_lens``.
        scale: factor of the scores.
        window: if greater than 0, a query at position p sees only positions p − window + 1 … p.
        softcap: if greater than 0, scores become ``softcap · tanh(score / softcap)``.
        sinks: float32 ``(q_heads,)``, or ``(T, q_heads)`` if tokens have their own: logits that enter the sum
            of the softmax but carry no value.
        k_scales: float32 ``(blocks, kv_heads, block_size)``, only for int8 and INT4 caches.
        v_scales: scales of the values, of the same shape.
        alibi_slopes: float32 ``(q_heads,)``: the slope of a head times the distance of a key from the query,
            key position − query position, is added to the score, after ``softcap``.
        relative: float32 ``(T, q_heads, rank)``, the factors of a learned bias of distance: where a key is
            less than ``extent`` before the query, this is added to the score, after ``softcap``:
            ``Σᵣ relative[t, h, r] · profiles[r, extent − 1 − distance]``.  The tokens may be strided.
        profiles: float32 ``(rank, extent)``, from the largest distance to 0.
        ahead: a query at position p also sees positions p + 1 … p + ahead of its sequence, as in encoders;
            the length of a text, or more, for all of them.  Not together with slopes or profiles.
        biases: float32 ``(q_heads, 2 · reach + 1)``, a learned bias of distance to both sides: the score of a
            key d positions after the query gets ``biases[h, reach + d]``, after ``softcap``, and the first or
            the last one if it is farther away than the reach.
        later: int64 ``(T,)``, like ``ahead`` for each token, as for the tokens of a picture; the larger one
            counts.  ``position + later`` never falls from one token of a sequence to the next.
        group_size: query heads of a kv head, where ranks share them out: head h reads kv head
            ``(h + skipped_heads) / group_size``.  0: ``q_heads / kv_heads``.
        skipped_heads: query heads of the first kv head that ``q`` lacks.

    Returns:
        ``(T, q_heads, value_size)`` in the dtype of ``q``, contiguous.  A token's result has the same bits
        alone, in a prefill chunk or in a batch, on any number of threads.  With float32 and float16 caches it
        also has the same bits in every kernel variant.

    Raises:
        RuntimeError: shapes, dtypes, lengths or block numbers do not match; the message names the value.

    Source: PagedAttention (arXiv 2309.06180).  Splits are merged by an online softmax, as in FlashDecoding.
    ``alibi_slopes`` are those of ALiBi (arXiv 2108.12409).
    """
