"""Attention of each token and KV head to blocks of positions that it chose."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_armllm.ops.attention.cache_layout import (
    block_size_of,
    keys_by_token,
    value_size_of,
    values_by_token,
)
from torch_armllm.ops.declare import op, reference


@op(lambda a: a.q.new_empty(a.q.shape[0], a.q.shape[1], value_size_of(a.v_cache)))
def block_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    chosen: Tensor,
    span: int,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    """Causal softmax attention of new tokens to the blocks of ``span`` positions that each of them chose.

    A sequence of up to ``top_k · span`` positions is attended to as a whole.  In longer ones a token reads
    the blocks that it chose, and no others; a block's positions after the token are hidden.

    Args:
        q: as for :func:`paged_attention`, as are all arguments that are not named here.
        k_cache: keys.
        v_cache: values.
        chosen: int32 ``(T, heads, top_k)``: blocks in ascending order, then −1 where a token sees fewer than
            ``top_k``, as :func:`torch_armllm.ops.select.select_blocks` returns them.  ``heads`` divides the
            KV heads: consecutive KV heads share a choice.
        span: positions of a block, counted from position 0; a multiple of the cache's block size.
        block_table: cache blocks of each sequence.
        query_start: first packed token of each sequence.
        seq_lens: length of each sequence.
        max_seq_len: an upper bound of ``seq_lens``.
        scale: factor of the scores.
        k_scales: scales of an int8 or INT4 cache's keys.
        v_scales: scales of its values.

    Returns:
        ``(T, q_heads, value_size)`` in the dtype of ``q``, contiguous.  A token's result has the same bits
        alone, in a chunk or in a batch; a token that chooses all blocks has the bits of
        :func:`paged_attention`.

    Raises:
        RuntimeError: shapes, dtypes, lengths or block numbers do not match; the message names the value.

    Source: MiniMax-M3 (block-sparse attention with one choice of key blocks for each KV head).
    """


@reference("block_attention")
def reference_block_attention(a: Any) -> Tensor:
    """Attends in float32, token by token and KV head by KV head; see :func:`block_attention`."""
    keys, values = keys_by_token(a.k_cache, a.k_scales), values_by_token(a.v_cache, a.v_scales)
    block_size, kv_heads = block_size_of(a.k_cache), a.k_cache.shape[1]
    group, shared = a.q.shape[1] // kv_heads, kv_heads // a.chosen.shape[1]
    out: Tensor = a.q.new_empty(a.q.shape[0], a.q.shape[1], value_size_of(a.v_cache))
    bounds = a.query_start.tolist()
    for index, length in enumerate(a.seq_lens.tolist()):
        for token in range(bounds[index], bounds[index + 1]):
            seen = torch.arange(length - bounds[index + 1] + token + 1)
            for head in range(kv_heads):
                at = seen
                if length > a.chosen.shape[2] * a.span:
                    at = seen[torch.isin(seen // a.span, a.chosen[token, head // shared])]
                blocks, heads = (
                    a.block_table[index, at // block_size].long(),
                    slice(head * group, (head + 1) * group),
                )
                k, v = (x[blocks, head, at % block_size].float() for x in (keys, values))
                scores = a.q[token, heads].float() @ k[:, : a.q.shape[2]].T * a.scale
                out[token, heads] = (scores.softmax(-1) @ v).to(a.q.dtype)
    return out
