"""Slow float32 versions of the recurrent ops, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_armllm.ops.declare import reference


@reference("causal_conv")
def reference_causal_conv(a: Any) -> Tensor:
    """:func:`torch_armllm.ops.recurrent.causal_conv` in plain float32 torch."""
    out = torch.empty_like(a.x)
    taps = a.weight.shape[0]
    for slot, tokens, is_new in _sequences(a.state_slots, a.query_start, a.seq_lens):
        before = torch.zeros_like(a.state[slot]) if is_new else a.state[slot]
        rows = torch.cat((before, a.x[tokens]))
        windows = rows.float().unfold(0, taps, 1)  # (tokens, channels, taps)
        sums = (windows * a.weight.t()).sum(-1)
        sums = sums if a.bias is None else sums + a.bias
        out[tokens] = (F.silu(sums) if a.silu else sums).to(a.x.dtype)
        for t, saved in _saves(tokens, a.save_slots):
            a.state[saved] = rows[t + 1 - tokens.start :][: taps - 1]
        a.state[slot] = rows[len(rows) - (taps - 1) :]
    return out


@reference("gated_delta_rule")
def reference_gated_delta_rule(a: Any) -> Tensor:
    """:func:`torch_armllm.ops.recurrent.gated_delta_rule` in plain float32 torch."""
    repeats = a.v.shape[1] // a.k.shape[1]
    queries, keys = (x.float().repeat_interleave(repeats, 1) for x in (a.q, a.k))
    if a.normalize:
        queries, keys = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (queries, keys))
    queries = queries * a.scale
    decay = a.gate.float().exp()
    decay = (decay if a.gate.ndim == 3 else decay[..., None])[..., None]  # (T, value_heads, key_size or 1, 1)
    out, saves = torch.empty_like(a.v), dict(_saves(slice(0, len(a.v)), a.save_slots))
    for slot, tokens, is_new in _sequences(a.state_slots, a.query_start, a.seq_lens):
        own = torch.zeros_like(a.state[slot]).float() if is_new else a.state[slot].float()
        for t in range(tokens.start, tokens.stop):
            own = own * decay[t]
            remembered = (own * keys[t][..., None]).sum(-2)
            added = (a.v[t].float() - remembered if a.delta else a.v[t].float()) * a.beta[t].float()[:, None]
            own = own + keys[t][..., None] * added[:, None]
            out[t] = (own * queries[t][..., None]).sum(-2).to(a.v.dtype)
            own = own.to(a.state.dtype).float()  # the next token sees the state as it is stored
            if t in saves:
                a.state[saves[t]] = own
        a.state[slot] = own
    return out


@reference("selective_scan")
def reference_selective_scan(a: Any) -> Tensor:
    """:func:`torch_armllm.ops.recurrent.selective_scan` in plain float32 torch."""
    ones = torch.ones(a.x.shape[0], a.a.shape[0])
    added, read = ((ones if part is None else part.float())[..., None] for part in (a.b, a.c))  # (T, N, 1)
    decay = (a.dt.float()[:, None] * a.a).exp()  # (T, N, channels)
    out, saves = torch.empty_like(a.x), dict(_saves(slice(0, len(a.x)), a.save_slots))
    for slot, tokens, is_new in _sequences(a.state_slots, a.query_start, a.seq_lens):
        own = torch.zeros_like(a.state[slot]).float() if is_new else a.state[slot].float()
        for t in range(tokens.start, tokens.stop):
            factors = (
                (1 - decay[t] * decay[t]).sqrt() if a.normalize and not (is_new and t == tokens.start) else 1
            )
            own = decay[t] * own + added[t] * a.x[t].float() * factors
            out[t] = (read[t] * own).sum(0).to(a.x.dtype)
            own = own.to(a.state.dtype).float()
            if t in saves:
                a.state[saves[t]] = own
        a.state[slot] = own
    return out


def _sequences(
    state_slots: Tensor, query_start: Tensor, seq_lens: Tensor
) -> Iterator[tuple[int, slice, bool]]:
    """Yields slot, tokens, and whether there were none before, of each sequence with new tokens."""
    starts = query_start.tolist()
    for slot, start, end, length in zip(
        state_slots.tolist(), starts, starts[1:], seq_lens.tolist(), strict=False
    ):
        if end > start:
            yield slot, slice(start, end), length == end - start


def _saves(tokens: slice, save_slots: Tensor | None) -> list[tuple[int, int]]:
    """Returns the tokens after which the state is saved, with the slots."""
    slots = [] if save_slots is None else save_slots.tolist()
    return [(t, slot) for t, slot in enumerate(slots) if slot >= 0 and tokens.start <= t < tokens.stop]
