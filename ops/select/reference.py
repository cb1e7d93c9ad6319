"""Reference of the selection of tokens: slow, in float32 and plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def index_scores(q: Tensor, weights: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Returns an indexer's scores ``(T, positions)`` in float32.

    Args:
        q: ``(T, heads, head_size)``.
        weights: ``(T, heads)``.
        keys: ``(positions, head_size)``.
        scale: factor of the products.
    """
    products = torch.einsum("thd,pd->thp", q.float(), keys.float()) * scale
    return torch.einsum("th,thp->tp", weights.float(), products.relu())


def highest(scores: Tensor, count: int) -> Tensor:
    """Returns the indices of the ``count`` highest scores in ascending order; of equal ones, the lowest."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count].sort(dim=-1).values


def reference_select_tokens(
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
    """Selects token by token; see :func:`torch_armllm.ops.select.select_tokens`."""
    out = torch.full((q.shape[0], top_k), -1, dtype=torch.int32)
    bounds = query_start.tolist()
    for index, length in enumerate(seq_lens.tolist()):
        begin, end = bounds[index], bounds[index + 1]
        blocks = block_table[index, : -(-length // keys.shape[1])]
        cached = keys[blocks.long()].flatten(0, 1)[:length]
        scores = index_scores(q[begin:end], weights[begin:end], cached, scale)
        for token in range(begin, end):
            seen = length - end + token + 1
            chosen = highest(scores[token - begin, :seen], top_k)
            out[token, : len(chosen)] = chosen.to(torch.int32)
    return out
