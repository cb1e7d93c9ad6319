"""Selection of the blocks of tokens that a query attends to, by the scores of an indexer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_armllm.ops.declare import op, reference
from torch_armllm.ops.select.reference import highest


@op(lambda a: a.q.new_empty((a.q.shape[0], a.q.shape[1], a.top_k), dtype=torch.int32))
def select_blocks(
    q: Tensor,
    keys: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    span: int,
    top_k: int,
    nearest: int,
) -> Tensor:
    """Selects for each sequence's last tokens and each head blocks of ``span`` positions.

    The score of a block is the largest product of the query with a key of the block that the token sees; NaN
    counts as the largest.  The nearest blocks are always selected, then those of the highest scores, and of
    equal scores the lowest blocks.

    Args:
        q: ``(T, heads, head_size)``, float32, bfloat16 or float16; tokens and heads may be strided.
        keys: ``(blocks, block_size, head_size)``, one of these dtypes: a cache of the indexer's keys, which
            all heads share, the new tokens included.  :func:`torch_armllm.ops.mla.mla_write` writes it.
        block_table: int32 ``(B, ≥ blocks per sequence)``, the cache blocks of each sequence in order.
        query_start: int32 ``(B + 1,)``, index of the first packed token of each sequence, then ``T``.
        seq_lens: int32 ``(B,)``, positions of each sequence in the cache, including the new tokens.
        max_seq_len: at least the largest value of ``seq_lens``.
        span: positions of a selected block, counted from position 0; a multiple of 16.
        top_k: most blocks that a token and head selects; up to 65536.
        nearest: blocks up to the token's own that are always selected.

    Returns:
        int32 ``(T, heads, top_k)``: blocks in ascending order, then −1 if the token sees fewer than ``top_k``
        blocks.  A token's choice is the same alone, in a chunk or in a batch, with any number of threads, on
        every variant.

    Raises:
        RuntimeError: a shape, dtype, length or block number is wrong; the message names the value.
    """


def block_scores(q: Tensor, keys: Tensor, seen: Tensor, span: int, nearest: int) -> Tensor:
    """Returns scores of blocks ``(heads, T, blocks)`` in float32; infinity for the nearest ones.

    Args:
        q: queries ``(T, heads, head_size)``.
        keys: ``(positions, head_size)``.
        seen: int64 ``(T,)``, number of positions that each query sees.
        span: positions of a block.
        nearest: blocks up to a query's own that are always selected.
    """
    products = torch.einsum("thd,pd->htp", q.float(), keys.float())
    positions = torch.arange(keys.shape[0], device=q.device)
    products = products.masked_fill(positions >= seen[:, None], float("-inf"))
    blocks = -(-keys.shape[0] // span)
    products = torch.nn.functional.pad(products, (0, blocks * span - keys.shape[0]), value=float("-inf"))
    scores = products.unflatten(-1, (blocks, span)).amax(-1)
    number, own = torch.arange(blocks, device=q.device), (seen[:, None] - 1) // span
    always = (number > own - nearest) & (number <= own)
    result: Tensor = scores.masked_fill(always, float("inf"))
    return result


@reference("select_blocks")
def reference_select_blocks(a: Any) -> Tensor:
    """Selects token by token in float32; see :func:`select_blocks`."""
    out = torch.full((a.q.shape[0], a.q.shape[1], a.top_k), -1, dtype=torch.int32)
    bounds = a.query_start.tolist()
    for index, length in enumerate(a.seq_lens.tolist()):
        blocks = a.block_table[index, : -(-length // a.keys.shape[1])]
        cached = a.keys[blocks.long()].flatten(0, 1)[:length]
        for token in range(bounds[index], bounds[index + 1]):
            seen = length - bounds[index + 1] + token + 1
            scores = block_scores(
                a.q[token : token + 1], cached[:seen], torch.tensor([seen]), a.span, a.nearest
            )[:, 0]
            chosen = highest(scores, a.top_k)
            out[token, :, : chosen.shape[1]] = chosen.to(torch.int32)
    return out
