"""Attention to compressed entries: a sequence's last tokens, and an entry for each window of all tokens.

Every ``rate`` tokens of a sequence become one entry, a sum that their gates weigh.  Entries lie in the blocks
of the sequence, each in the block of the last token that it sums: whatever happens to a block happens to its
entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.ops.compress.reference import (
    most_per_block,
    reference_compress_windows,
    reference_entry_attention,
    reference_select_entries,
)
from torch_armllm.ops.declare import op

__all__ = [
    "compress_windows",
    "entry_attention",
    "most_per_block",
    "reference_compress_windows",
    "reference_entry_attention",
    "reference_select_entries",
    "select_entries",
]


@op()
def compress_windows(
    kv: Tensor,
    gate: Tensor,
    bias: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    state: Tensor,
    entries: Tensor,
    block_table: Tensor,
    state_slots: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_size: int,
    eps: float,
    save_slots: Tensor | None = None,
) -> None:
    """Writes the entry of each window of ``rate`` tokens that the new tokens complete.

    The entry is ``Σ softmax(gate + bias) · kv`` over the tokens of the window, channel by channel, then
    an RMS norm and a rotation of its last channels.  If kv and gate have two values of each channel, the sum
    is over two windows: it takes the first values of the window before, and the second ones of the window
    itself.
    Computed in float32, and rounded once.

    Args:
        kv: ``(T, parts · size)`` in float32, bfloat16 or float16, packed tokens of S sequences, which may be
            strided; one or two parts.
        gate: likewise, in the dtype of ``kv``.
        bias: ``(rate, parts · size)`` float32, added to the gates of a window's tokens.
        weight: ``(size,)`` float32, the weight of the norm.
        cos: ``(T, pairs)``, one of these dtypes: the rotation of the entry that a token completes.
        sin: likewise.  Channels ``size - 2 · pairs + 2i`` and the one after it are a pair.
        state: ``(slots, rate · parts - 1, 2 · parts · size)`` in the dtype of ``kv``: the values of the
            tokens before the new ones, and their gates; that of a position is row ``position % rows``.  It
            is updated.
        entries: ``(blocks, ceil(block_size / rate), size)``, one of these dtypes.  Entry n lies in the block
            of position ``(n + 1) · rate - 1``, after those that end in the block before it.
        block_table: int32 ``(S, ≥ blocks per sequence)``, the blocks of each sequence in order.
        state_slots: ``(S,)`` int64, the slot of each sequence, all different.
        query_start: ``(S + 1,)`` int32, the first token of each sequence, and T.
        seq_lens: ``(S,)`` int32, the length of each sequence including its new tokens.  The slot of a
            sequence without earlier tokens is not read.
        block_size: positions of a block.
        eps: added to the mean square of the norm.
        save_slots: ``(T,)`` int64, the slot to which the state after a token is also written, -1 for none;
            None or empty: none at all.  No slot may be named twice, or belong to a sequence of the step.

    Raises:
        RuntimeError: a shape, dtype, slot, block or length is wrong.

    Source: DeepSeek-V4, section 2.3 (compressed sparse and heavily compressed attention).
    """


@op(lambda a: a.q.new_empty((a.q.shape[0], a.top_k), dtype=torch.int32))
def select_entries(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    block_size: int,
    rate: int,
    scale: float,
    top_k: int,
) -> Tensor:
    """Selects for each sequence's last tokens the entries of the highest scores.

    A token sees the entries of windows that are complete with it.  Scores and choice are those of
    :func:`torch_armllm.ops.select.select_tokens`.

    Args:
        q: ``(T, heads, head_size)``, float32, bfloat16 or float16; tokens and heads may be strided.
        weights: ``(T, heads)``, one of these dtypes.
        keys: ``(blocks, ceil(block_size / rate), head_size)``, one of these dtypes: entries that
            :func:`compress_windows` wrote.
        block_table: int32 ``(B, ≥ blocks per sequence)``, the cache blocks of each sequence in order.
        query_start: int32 ``(B + 1,)``, index of the first packed token of each sequence, then ``T``.
        seq_lens: int32 ``(B,)``, positions of each sequence in the cache, including the new tokens.
        max_seq_len: at least the largest value of ``seq_lens``.
        block_size: positions of a block.
        rate: positions of an entry.
        scale: positive factor of the products.
        top_k: most entries that a token selects; up to 65536.

    Returns:
        int32 ``(T, top_k)``: entries in ascending order, then −1 if the token sees fewer than ``top_k``.

    Raises:
        RuntimeError: a shape, dtype, length or block number is wrong; the message names the value.
    """


@op(lambda a: a.q.new_empty(a.q.shape))
def entry_attention(
    q: Tensor,
    cache: Tensor,
    entries: Tensor | None,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
    window: int,
    rate: int = 0,
    sinks: Tensor | None = None,
    selected: Tensor | None = None,
) -> Tensor:
    """Computes softmax attention of each sequence's last tokens over recent tokens and compressed entries.

    Keys and values are the same rows, which all heads share.  One softmax is over a token's last ``window``
    positions, its own included, and over the entries of windows that are complete with it.

    Args:
        q: ``(T, heads, size)``, float32, bfloat16 or float16.
        cache: ``(blocks, block_size, size)`` in one of these dtypes, the new tokens included; see
            :func:`torch_armllm.ops.mla.new_latent_cache` with a rotated key of size 0.
        entries: ``(blocks, ceil(block_size / rate), size)`` in the dtype of ``cache``, as
            :func:`compress_windows` wrote them; None: tokens attend to their last positions alone.
        block_table: int32 ``(B, ≥ blocks per sequence)``, the cache blocks of each sequence in order.
        query_start: int32 ``(B + 1,)``, index of the first packed token of each sequence, then ``T``.
        seq_lens: int32 ``(B,)``, positions of each sequence in the cache, including the new tokens.
        max_seq_len: at least the largest value of ``seq_lens``.
        scale: factor of the scores.
        window: number of visible positions up to a token's own.
        rate: positions of an entry; unused without entries.
        sinks: float32 ``(heads,)``: logits that enter the sum of the softmax but carry no value.
        selected: int32 ``(T, n)``, the entries that each token attends to, as :func:`select_entries` returns
            them; None: all that it sees.

    Returns:
        ``(T, heads, size)`` in the dtype of ``q``.  A token's result has the same bits alone, in a chunk or
        in a batch, with any number of threads.

    Raises:
        RuntimeError: a shape, dtype, length, block number or selected entry is wrong; the message names the
            value.
    """
