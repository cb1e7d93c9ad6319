"""References of the ops on compressed entries: slow, in float32 and plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torch_armllm.ops.declare import reference
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


@reference("compress_windows")
def reference_compress_windows(a: Any) -> None:
    """Compresses window by window; see :func:`torch_armllm.ops.compress.compress_windows`."""
    rate, size = a.bias.shape[0], a.weight.shape[0]
    kept = rate * (a.kv.shape[1] // size) - 1
    before = a.state.clone()
    for index, first, tokens, length in _sequences(a.query_start, a.seq_lens):
        begin, slot = length - tokens, int(a.state_slots[index])
        rows = torch.cat([a.kv[first : first + tokens], a.gate[first : first + tokens]], 1)

        def row(position: int, begin: int = begin, slot: int = slot, rows: Tensor = rows) -> Tensor:
            return rows[position - begin] if position >= begin else before[slot, position % kept]

        def save(last: int, to: int, row: object = row) -> None:
            for position in range(max(last - kept, 0), last):
                a.state[to, position % kept] = row(position)  # type: ignore[operator]

        for token in range(tokens):
            position = begin + token
            if a.save_slots is not None and len(a.save_slots) and a.save_slots[first + token] >= 0:
                save(position + 1, int(a.save_slots[first + token]))
            if (position + 1) % rate:
                continue
            summed = torch.stack([row(p) for p in range(max(position - kept, 0), position + 1)])
            values, gates = summed.chunk(2, 1)
            turns = a.cos[first + token].float(), a.sin[first + token].float()
            block, place = entry_row(position // rate, a.block_table[index].tolist(), a.block_size, rate)
            entry = compressed(values, gates, a.bias, a.weight, *turns, a.eps)
            a.entries[block, place] = entry.to(a.entries.dtype)
        save(length, slot)


def _cached(rows: Tensor, blocks: list[int], count: int, block_size: int, rate: int) -> Tensor:
    """Returns the first entries of a sequence ``(count, size)`` in float32."""
    places = [entry_row(entry, blocks, block_size, rate) for entry in range(count)]
    found = [rows[block, row] for block, row in places]
    return torch.stack(found).float() if found else rows.new_empty((0, rows.shape[2])).float()


@reference("select_entries")
def reference_select_entries(a: Any) -> Tensor:
    """Selects token by token; see :func:`torch_armllm.ops.compress.select_entries`."""
    out = torch.full((a.q.shape[0], a.top_k), -1, dtype=torch.int32)
    for index, first, tokens, length in _sequences(a.query_start, a.seq_lens):
        cached = _cached(a.keys, a.block_table[index].tolist(), length // a.rate, a.block_size, a.rate)
        scores = index_scores(a.q[first : first + tokens], a.weights[first : first + tokens], cached, a.scale)
        for token in range(tokens):
            seen = (length - tokens + token + 1) // a.rate
            chosen = highest(scores[token, :seen], a.top_k)
            out[first + token, : len(chosen)] = chosen.to(torch.int32)
    return out


@reference("entry_attention")
def reference_entry_attention(a: Any) -> Tensor:
    """Attends token by token; see :func:`torch_armllm.ops.compress.entry_attention`."""
    out = torch.empty_like(a.q, memory_format=torch.contiguous_format)
    block_size = a.cache.shape[1]
    for index, first, tokens, length in _sequences(a.query_start, a.seq_lens):
        blocks = a.block_table[index].tolist()
        rows = a.cache[a.block_table[index, : -(-length // block_size)].long()].flatten(0, 1)[:length].float()
        kept = (
            rows[:0]
            if a.entries is None
            else _cached(a.entries, blocks, length // a.rate, block_size, a.rate)
        )
        for token in range(first, first + tokens):
            end = length - first - tokens + token + 1
            seen = kept[: 0 if a.entries is None else end // a.rate]
            if a.selected is not None:
                seen = seen[a.selected[token, : min(len(seen), a.selected.shape[1])].long()]
            keys = torch.cat([rows[max(end - a.window, 0) : end], seen])
            scores = a.q[token].float() @ keys.T * a.scale
            if a.sinks is not None:
                scores = torch.cat([scores, a.sinks.float()[:, None]], 1)
            out[token] = (scores.softmax(1)[:, : len(keys)] @ keys).to(out.dtype)
    return out
