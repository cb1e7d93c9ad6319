"""Softmax attention of new tokens over a paged KV cache."""

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
from torch_armllm.ops.declare import PerHead, op, reference


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
    sinks: PerHead = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    alibi_slopes: PerHead = None,
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


@reference("paged_attention")
def reference_paged_attention(a: Any) -> Tensor:
    """Attention in float32, sequence by sequence; see :func:`torch_armllm.ops.attention.paged_attention`."""
    block_size, value_size = block_size_of(a.k_cache), value_size_of(a.v_cache)
    all_keys, all_values = (keys_by_token(a.k_cache, a.k_scales), values_by_token(a.v_cache, a.v_scales))
    out: Tensor = a.q.new_empty(a.q.shape[0], a.q.shape[1], value_size)
    group = a.group_size or a.q.shape[1] // a.k_cache.shape[1]
    own = slice(a.skipped_heads, a.skipped_heads + a.q.shape[1])
    bounds = a.query_start.tolist()
    for index, length in enumerate(a.seq_lens.tolist()):
        begin, end = bounds[index], bounds[index + 1]
        if begin == end:
            continue
        last = torch.arange(length - (end - begin), length)
        position = torch.arange(length)
        most = torch.full_like(last, a.ahead) if a.later is None else a.later[begin:end].clamp(min=a.ahead)
        hidden = position[None] - last[:, None] > most[:, None]
        if a.window > 0:
            hidden |= position[None] <= last[:, None] - a.window
        # Blocks before the window may be freed; their table entries can be negative.
        blocks = a.block_table[index, : -(-length // block_size)].clamp(min=0)
        k = _in_order(all_keys, blocks, length)[..., : a.q.shape[2]].repeat_interleave(group, 1)[:, own]
        v = _in_order(all_values, blocks, length).repeat_interleave(group, 1)[:, own]
        v = v.masked_fill(hidden.all(0)[:, None, None], 0.0)
        scores = torch.einsum("qhd,khd->hqk", a.q[begin:end].to(torch.float32), k) * a.scale
        if a.softcap > 0.0:
            scores = a.softcap * torch.tanh(scores / a.softcap)
        if a.alibi_slopes is not None:
            distance = position[None] - last[:, None]
            scores = scores + a.alibi_slopes.to(torch.float32)[:, None, None] * distance
        if a.relative is not None and a.profiles is not None:
            by_distance = torch.einsum("qhr,rd->hqd", a.relative[begin:end], a.profiles.flip(1))
            away = (last[:, None] - position[None]).expand(a.q.shape[1], -1, -1)
            nearest = by_distance.gather(2, away.clamp(0, a.profiles.shape[1] - 1))
            scores = scores + nearest.masked_fill(away >= a.profiles.shape[1], 0.0)
        if a.biases is not None:
            reach = a.biases.shape[1] // 2
            scores = scores + a.biases[:, (position[None] - last[:, None]).clamp(-reach, reach) + reach]
        scores = scores.masked_fill(hidden, -torch.inf)
        if a.sinks is not None:
            rows = a.sinks[begin:end].T if a.sinks.dim() == 2 else a.sinks[:, None]
            column = rows.to(torch.float32)[..., None].expand(-1, end - begin, 1)
            weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, v).to(a.q.dtype)
    return out


def _in_order(blocks_of: Tensor, blocks: Tensor, length: int) -> Tensor:
    """First ``length`` tokens of a sequence, as float32 ``(length, kv_heads, size)``.

    Args:
        blocks_of: keys or values, ``(blocks, kv_heads, positions, size)``.
        blocks: the sequence's row of the block table.
        length: positions of the sequence.
    """
    taken = blocks_of[blocks.long()].transpose(1, 2).flatten(0, 1)
    return taken[:length].to(torch.float32)
