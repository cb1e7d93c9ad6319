"""Selection of what a query attends to, tokens or blocks, by the scores of an indexer (sparse attention)."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.ops.declare import op
from torch_armllm.ops.select.blocks import reference_select_blocks, select_blocks
from torch_armllm.ops.select.reference import reference_select_tokens

__all__ = ["reference_select_blocks", "reference_select_tokens", "select_blocks", "select_tokens"]


@op(lambda a: a.q.new_empty((a.q.shape[0], a.top_k), dtype=torch.int32))
def select_tokens(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
    top_k: int,
) -> Tensor:
    """Selects for each sequence's last tokens the positions of the highest scores.

    The score of a token and a position is the sum of ``weight · relu(scale · q · key)`` over the heads of the
    indexer, which share one key per position.  Of equal scores, the lowest positions are selected; NaN counts
    as the highest score.

    Args:
        q: ``(T, heads, head_size)``, float32, bfloat16 or float16; tokens and heads may be strided.
        weights: ``(T, heads)``, one of these dtypes.
        keys: ``(blocks, block_size, head_size)``, one of these dtypes: a cache of the indexer's keys, the new
            tokens included.  :func:`torch_armllm.ops.mla.mla_write` writes it.
        block_table: int32 ``(B, ≥ blocks per sequence)``, the cache blocks of each sequence in order.
        query_start: int32 ``(B + 1,)``, index of the first packed token of each sequence, then ``T``.
        seq_lens: int32 ``(B,)``, positions of each sequence in the cache, including the new tokens.
        max_seq_len: at least the largest value of ``seq_lens``.
        scale: positive factor of the products.
        top_k: most positions that a token selects; up to 65536.

    Returns:
        int32 ``(T, top_k)``: positions in ascending order, then −1 if the token sees fewer than ``top_k``
        positions.  A token's row is the same alone, in a chunk or in a batch, with any number of threads, on
        every variant.

    Raises:
        RuntimeError: a shape, dtype, length or block number is wrong; the message names the value.

    Source: DeepSeek-V3.2-Exp, "Boosting Long-Context Efficiency with DeepSeek Sparse Attention", section 1
    (the lightning indexer).
    """
