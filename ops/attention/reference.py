"""Slow float32 versions of the attention ops, in plain PyTorch."""

from __future__ import annotations

from typing import Any

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
from torch_armllm.ops.declare import reference


@reference("kv_write")
def reference_kv_write(a: Any) -> None:
    """Write each token's key and value to its slot; see :func:`torch_armllm.ops.attention.kv_write`."""
    if a.k_cache.dtype == torch.uint8:
        assert a.k_scales is not None and a.v_scales is not None
        _write_int4(a.k, a.v, KvCache(a.k_cache, a.v_cache, a.k_scales, a.v_scales), a.slots)
        return
    dtype, size, group = a.k_cache.dtype, block_size_of(a.k_cache), GROUPS[a.k_cache.dtype]
    padding = (0, -a.k.shape[2] % group)
    keys, values = torch.nn.functional.pad(a.k, padding), a.v
    if a.k_scales is not None and a.v_scales is not None:
        keys, key_scales = quantize_by_token(rotated(keys.float(), rotation_of(keys.shape[-1])))
        values, value_scales = quantize_by_token(values)
    for token, slot in enumerate(a.slots.tolist()):
        if slot < 0:
            continue
        block, offset = divmod(slot, size)
        key, value = keys[token].to(dtype), values[token].to(dtype)
        if group == 1:
            a.k_cache[block, :, :, offset] = key
            a.v_cache[block, :, offset] = value
        else:
            a.k_cache[block, :, :, offset] = key.unflatten(1, (-1, group))
            a.v_cache[block, :, offset // group, :, offset % group] = value
        if a.k_scales is not None and a.v_scales is not None:
            a.k_scales[block, :, offset] = key_scales[token]
            a.v_scales[block, :, offset] = value_scales[token]


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
