"""References of the ops on compressed entries: slow, in float32 and plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torch_armllm.ops.select.reference import highest, index_scores


def most_per_block(block_size: int, rate: int) -> int:
    """Returns the most entries that end in one block: the rows that a block of entries has."""
    return -(-block_size // rate)


def entry_row(entry: int, blocks: list[int], block_size: int, rate: int) -> tuple[int, int]:
    """Returns block and row of an entry of a sequence with these blocks."""
    block = ((entry + 1) * rate - 1) // block_size
    return blocks[block], entry - block * block_size // rate


def compressed(
    kv: Tensor, gate: Tensor, bias: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> Tensor:
    """Returns one entry ``(size,)`` in float32, from all tokens that it sums; the reference implementation.

    Args:
        kv: ``(tokens, parts · size)`` of the window, after those of the window before if there are two parts.
        gate: likewise.
        bias: ``(rate, parts · size)``.
        weight: ``(size,)``, of the norm.
        cos: ``(pairs,)``.
        sin: likewise.
        eps: added to the mean square.
    """
    rate, size = bias.shape[0], weight.shape[0]
    values = kv.float()
    gates = gate.float() + bias.float().repeat(len(kv) // rate, 1)
    if bias.shape[1] > size:
        before = len(kv) - rate
        values, gates = (torch.cat([x[:before, :size], x[before:, size:]]) for x in (values, gates))
    pooled = (gates.softmax(0) * values).sum(0)
    normed = weight.float() * (pooled * torch.rsqrt(pooled.square().mean() + eps))
    rest, last = normed.split([size - 2 * len(cos), 2 * len(cos)])
    even, odd = last[0::2], last[1::2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten()
    return torch.cat([rest, turned])


def _sequences(query_start: Tensor, seq_lens: Tensor) -> Iterator[tuple[int, int, int, int]]:
    """Yields number, first token, number of tokens and length of each sequence with tokens."""
    bounds = query_start.tolist()
    for index, length in enumerate(seq_lens.tolist()):
        if bounds[index + 1] > bounds[index]:
            yield index, bounds[index], bounds[index + 1] - bounds[index], length


def reference_compress_windows(
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
    """Compresses window by window; see :func:`torch_armllm.ops.compress.compress_windows`."""
    rate, size = bias.shape[0], weight.shape[0]
    kept = rate * (kv.shape[1] // size) - 1
    before = state.clone()
    for index, first, tokens, length in _sequences(query_start, seq_lens):
        begin, slot = length - tokens, int(state_slots[index])
        rows = torch.cat([kv[first : first + tokens], gate[first : first + tokens]], 1)

        def row(position: int, begin: int = begin, slot: int = slot, rows: Tensor = rows) -> Tensor:
            return rows[position - begin] if position >= begin else before[slot, position % kept]

        def save(last: int, to: int, row: object = row) -> None:
            for position in range(max(last - kept, 0), last):
                state[to, position % kept] = row(position)  # type: ignore[operator]

        for token in range(tokens):
            position = begin + token
            if save_slots is not None and len(save_slots) and save_slots[first + token] >= 0:
                save(position + 1, int(save_slots[first + token]))
            if (position + 1) % rate:
                continue
            summed = torch.stack([row(p) for p in range(max(position - kept, 0), position + 1)])
            values, gates = summed.chunk(2, 1)
            turns = cos[first + token].float(), sin[first + token].float()
            block, place = entry_row(position // rate, block_table[index].tolist(), block_size, rate)
            entry = compressed(values, gates, bias, weight, *turns, eps)
            entries[block, place] = entry.to(entries.dtype)
        save(length, slot)


def _cached(rows: Tensor, blocks: list[int], count: int, block_size: int, rate: int) -> Tensor:
    """Returns the first entries of a sequence ``(count, size)`` in float32."""
    places = [entry_row(entry, blocks, block_size, rate) for entry in range(count)]
    found = [rows[block, row] for block, row in places]
    return torch.stack(found).float() if found else rows.new_empty((0, rows.shape[2])).float()


def reference_select_entries(
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
    """Selects token by token; see :func:`torch_armllm.ops.compress.select_entries`."""
    out = torch.full((q.shape[0], top_k), -1, dtype=torch.int32)
    for index, first, tokens, length in _sequences(query_start, seq_lens):
        cached = _cached(keys, block_table[index].tolist(), length // rate, block_size, rate)
        scores = index_scores(q[first : first + tokens], weights[first : first + tokens], cached, scale)
        for token in range(tokens):
            seen = (length - tokens + token + 1) // rate
            chosen = highest(scores[token, :seen], top_k)
            out[first + token, : len(chosen)] = chosen.to(torch.int32)
    return out


def reference_entry_attention(
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
    """Attends token by token; see :func:`torch_armllm.ops.compress.entry_attention`."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    block_size = cache.shape[1]
    for index, first, tokens, length in _sequences(query_start, seq_lens):
        blocks = block_table[index].tolist()
        rows = cache[block_table[index, : -(-length // block_size)].long()].flatten(0, 1)[:length].float()
        kept = rows[:0] if entries is None else _cached(entries, blocks, length // rate, block_size, rate)
        for token in range(first, first + tokens):
            end = length - first - tokens + token + 1
            seen = kept[: 0 if entries is None else end // rate]
            if selected is not None:
                seen = seen[selected[token, : min(len(seen), selected.shape[1])].long()]
            keys = torch.cat([rows[max(end - window, 0) : end], seen])
            scores = q[token].float() @ keys.T * scale
            if sinks is not None:
                scores = torch.cat([scores, sinks.float()[:, None]], 1)
            out[token] = (scores.softmax(1)[:, : len(keys)] @ keys).to(out.dtype)
    return out
