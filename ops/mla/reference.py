"""References of the latent attention ops: slow, in float32 and plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_armllm.ops.attention.cache_layout import quantize_by_token
from torch_armllm.ops.declare import reference


def reference_mla_write(latent: Tensor, k_rope: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Writes each token's latent and key to its slot; see :func:`torch_armllm.ops.mla.mla_write`."""
    rows = cache.view(-1, cache.shape[-1])
    if cache.dtype == torch.int8:
        parts = [quantize_by_token(x) if x.shape[1] else (x, x.sum(1)) for x in (latent, k_rope)]
        scales = torch.stack([scale for _, scale in parts], -1)
        written = torch.cat([*(q.to(torch.int8) for q, _ in parts), scales.float().view(torch.int8)], -1)
    else:
        written = torch.cat([latent.to(cache.dtype), k_rope.to(cache.dtype)], -1)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            rows[slot] = written[token]


def latents_by_token(cache: Tensor, rank: int) -> Tensor:
    """Returns what the rows of a cache stand for.

    Args:
        cache: ``(…, rank + rope_size)`` as in :func:`torch_armllm.ops.mla.new_latent_cache`.
        rank: elements of a latent.

    Returns:
        ``(…, rank + rope_size)``, float32 if the cache is int8, or else the cache.
    """
    if cache.dtype != torch.int8:
        return cache
    count = 2 * torch.float32.itemsize
    integers, scales = cache[..., :-count], cache[..., -count:].contiguous().view(torch.float32)
    of_element = (torch.arange(integers.shape[-1]) >= rank).long()
    return integers.to(torch.float32) * scales[..., of_element]


@reference("mla_attention")
def reference_mla_attention(a: Any) -> Tensor:
    """Attention in float32, sequence by sequence; see :func:`torch_armllm.ops.mla.mla_attention`."""
    rank = a.q_latent.shape[2]
    q = torch.cat([a.q_latent, a.q_rope], -1).to(torch.float32)
    out = torch.empty_like(a.q_latent, memory_format=torch.contiguous_format)
    bounds = a.query_start.tolist()
    for index, length in enumerate(a.seq_lens.tolist()):
        begin, end = bounds[index], bounds[index + 1]
        if begin == end:
            continue
        blocks = a.block_table[index, : -(-length // a.cache.shape[1])]
        keys = latents_by_token(a.cache[blocks.long()], rank).flatten(0, 1)[:length].to(torch.float32)
        last = torch.arange(length - (end - begin), length)
        distance = last[:, None] - torch.arange(length)[None]
        hidden = distance < 0
        if a.window > 0:
            hidden |= distance >= a.window
        if a.selected is not None and length > a.selected.shape[1]:
            for row, (token, position) in enumerate(zip(range(begin, end), last.tolist(), strict=True)):
                kept = a.selected[token, : position + 1].long()
                hidden[row] = True
                hidden[row, kept] = False
        scores = torch.einsum("qhd,kd->hqk", q[begin:end], keys) * a.scale
        scores = scores.masked_fill(hidden, -torch.inf)
        if a.sinks is not None:
            column = a.sinks.to(torch.float32)[:, None, None].expand(-1, end - begin, 1)
            scores = torch.cat([scores, column], -1)
        weights = scores.softmax(-1)[..., :length]
        out[begin:end] = torch.einsum("hqk,kd->qhd", weights, keys[:, :rank]).to(out.dtype)
    return out
