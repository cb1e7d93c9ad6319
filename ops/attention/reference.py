"""Slow float32 versions of the attention ops, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Writes each token's key and value to its slot; see :func:`torch_armllm.ops.attention.kv_write`."""
    block_size = v_cache.shape[2]
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        block, offset = divmod(slot, block_size)
        k_cache[block, :, :, offset] = k[token].to(k_cache.dtype)
        v_cache[block, :, offset, :] = v[token].to(v_cache.dtype)


def gather(cache: Tensor, blocks: Tensor, length: int, position_dim: int) -> Tensor:
    """``(length, kv_heads, size)`` float32: a sequence's keys (dimension 3) or values (2) in order."""
    taken = cache[blocks.long()].movedim(position_dim, 1).flatten(0, 1)
    return taken[:length].to(torch.float32)


def reference_paged_attention(
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
) -> Tensor:
    """Attention in float32, sequence by sequence; see :func:`torch_armllm.ops.attention.paged_attention`."""
    block_size, value_size = v_cache.shape[2], v_cache.shape[3]
    out = q.new_empty(q.shape[0], q.shape[1], value_size)
    group = q.shape[1] // k_cache.shape[1]
    bounds = query_start.tolist()
    for index, length in enumerate(seq_lens.tolist()):
        begin, end = bounds[index], bounds[index + 1]
        if begin == end:
            continue
        last = torch.arange(length - (end - begin), length)
        position = torch.arange(length)
        hidden = position[None] > last[:, None]
        if window > 0:
            hidden |= position[None] <= last[:, None] - window
        # Blocks before the window may be gone from the table.
        blocks = block_table[index, : -(-length // block_size)].clamp(min=0)
        k = gather(k_cache, blocks, length, 3).repeat_interleave(group, 1)
        v = gather(v_cache, blocks, length, 2).repeat_interleave(group, 1)
        v = v.masked_fill(hidden.all(0)[:, None, None], 0.0)
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].to(torch.float32), k) * scale
        if softcap > 0.0:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            column = sinks.to(torch.float32)[:, None, None].expand(-1, end - begin, 1)
            weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
    return out
