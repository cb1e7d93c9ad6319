"""Slow float32 versions of the attention ops, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.ops.attention.cache_layout import (
    GROUPS,
    KvCache,
    block_size_of,
    keys_by_token,
    quantize_by_token,
    quantize_int4_by_token,
    rotated,
    rotation_of,
    value_size_of,
    values_by_token,
)


def reference_kv_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Write each token's key and value to its slot; see :func:`torch_armllm.ops.attention.kv_write`."""
    if k_cache.dtype == torch.uint8:
        assert k_scales is not None and v_scales is not None
        _write_int4(k, v, KvCache(k_cache, v_cache, k_scales, v_scales), slots)
        return
    dtype, size, group = k_cache.dtype, block_size_of(k_cache), GROUPS[k_cache.dtype]
    padding = (0, -k.shape[2] % group)
    keys, values = torch.nn.functional.pad(k, padding), v
    if k_scales is not None and v_scales is not None:
        keys, key_scales = quantize_by_token(rotated(keys.float(), rotation_of(keys.shape[-1])))
        values, value_scales = quantize_by_token(values)
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        block, offset = divmod(slot, size)
        key, value = keys[token].to(dtype), values[token].to(dtype)
        if group == 1:
            k_cache[block, :, :, offset] = key
            v_cache[block, :, offset] = value
        else:
            k_cache[block, :, :, offset] = key.unflatten(1, (-1, group))
            v_cache[block, :, offset // group, :, offset % group] = value
        if k_scales is not None and v_scales is not None:
            k_scales[block, :, offset] = key_scales[token]
            v_scales[block, :, offset] = value_scales[token]


def _write_int4(k: Tensor, v: Tensor, cache: KvCache, slots: Tensor) -> None:
    size = block_size_of(cache.k)
    for x, packed, scales, keys in ((k, cache.k, cache.k_scales, True), (v, cache.v, cache.v_scales, False)):
        assert scales is not None
        q, factors, scale = quantize_int4_by_token(x)
        pairs = q.unflatten(-1, (-1, 2, 2, 8) if keys else (-1, 2, 16))
        low, high = pairs.unbind(-2)
        halves = low | high << 4  # (T, heads, groups, 2, 8) of keys, (T, heads, groups, 16) of values
        for token, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            block, at = divmod(slot, size)
            whole = packed[block].flatten(2)
            bytes_ = whole[..., : 16 * size]
            if keys:
                bytes_.unflatten(-1, (2, size, 8))[..., at, :] = halves[token]
            else:
                bytes_.unflatten(-1, (size // 8, 16, 8))[..., at // 8, :, at % 8] = halves[token]
            whole[..., 16 * size :].unflatten(-1, (3, size))[..., at] = factors[token]
            scales[block, :, at] = scale[token]


def _in_order(blocks_of: Tensor, blocks: Tensor, length: int) -> Tensor:
    """First ``length`` tokens of a sequence, as float32 ``(length, kv_heads, size)``.

    Args:
        blocks_of: keys or values, ``(blocks, kv_heads, positions, size)``.
        blocks: the sequence's row of the block table.
        length: positions of the sequence.
    """
    taken = blocks_of[blocks.long()].transpose(1, 2).flatten(0, 1)
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
    """Attention in float32, sequence by sequence; see :func:`torch_armllm.ops.attention.paged_attention`."""
    block_size, value_size = block_size_of(k_cache), value_size_of(v_cache)
    all_keys, all_values = keys_by_token(k_cache, k_scales), values_by_token(v_cache, v_scales)
    out = q.new_empty(q.shape[0], q.shape[1], value_size)
    group = group_size or q.shape[1] // k_cache.shape[1]
    own = slice(skipped_heads, skipped_heads + q.shape[1])
    bounds = query_start.tolist()
    for index, length in enumerate(seq_lens.tolist()):
        begin, end = bounds[index], bounds[index + 1]
        if begin == end:
            continue
        last = torch.arange(length - (end - begin), length)
        position = torch.arange(length)
        most = torch.full_like(last, ahead) if later is None else later[begin:end].clamp(min=ahead)
        hidden = position[None] - last[:, None] > most[:, None]
        if window > 0:
            hidden |= position[None] <= last[:, None] - window
        # Blocks before the window may be freed; their table entries can be negative.
        blocks = block_table[index, : -(-length // block_size)].clamp(min=0)
        k = _in_order(all_keys, blocks, length)[..., : q.shape[2]].repeat_interleave(group, 1)[:, own]
        v = _in_order(all_values, blocks, length).repeat_interleave(group, 1)[:, own]
        v = v.masked_fill(hidden.all(0)[:, None, None], 0.0)
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].to(torch.float32), k) * scale
        if softcap > 0.0:
            scores = softcap * torch.tanh(scores / softcap)
        if alibi_slopes is not None:
            distance = position[None] - last[:, None]
            scores = scores + alibi_slopes.to(torch.float32)[:, None, None] * distance
        if relative is not None and profiles is not None:
            by_distance = torch.einsum("qhr,rd->hqd", relative[begin:end], profiles.flip(1))
            away = (last[:, None] - position[None]).expand(q.shape[1], -1, -1)
            nearest = by_distance.gather(2, away.clamp(0, profiles.shape[1] - 1))
            scores = scores + nearest.masked_fill(away >= profiles.shape[1], 0.0)
        if biases is not None:
            reach = biases.shape[1] // 2
            scores = scores + biases[:, (position[None] - last[:, None]).clamp(-reach, reach) + reach]
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            rows = sinks[begin:end].T if sinks.dim() == 2 else sinks[:, None]
            column = rows.to(torch.float32)[..., None].expand(-1, end - begin, 1)
            weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
    return out
