"""Reference of the selection of tokens: slow, in float32 and plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_armllm.ops.declare import reference


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


@reference("select_tokens")
def reference_select_tokens(a: Any) -> Tensor:
    """Selects token by token; see :func:`torch_armllm.ops.select.select_tokens`."""
    out = torch.full((a.q.shape[0], a.top_k), -1, dtype=torch.int32)
    bounds = a.query_start.tolist()
    for index, length in enumerate(a.seq_lens.tolist()):
        begin, end = bounds[index], bounds[index + 1]
        blocks = a.block_table[index, : -(-length // a.keys.shape[1])]
        cached = a.keys[blocks.long()].flatten(0, 1)[:length]
        scores = index_scores(a.q[begin:end], a.weights[begin:end], cached, a.scale)
        for token in range(begin, end):
            seen = length - end + token + 1
            chosen = highest(scores[token - begin, :seen], a.top_k)
            out[token, : len(chosen)] = chosen.to(torch.int32)
    return out
