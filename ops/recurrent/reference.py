"""Slow float32 versions of the recurrent ops, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor


def reference_causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    state_slots: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    silu: bool = False,
    save_slots: Tensor | None = None,
) -> Tensor:
    """:func:`torch_armllm.ops.recurrent.causal_conv` in plain float32 torch."""
    out = torch.empty_like(x)
    taps = weight.shape[0]
    for slot, tokens, is_new in _sequences(state_slots, query_start, seq_lens):
        before = torch.zeros_like(state[slot]) if is_new else state[slot]
        rows = torch.cat((before, x[tokens]))
        windows = rows.float().unfold(0, taps, 1)  # (tokens, channels, taps)
        sums = (windows * weight.t()).sum(-1)
        sums = sums if bias is None else sums + bias
        out[tokens] = (F.silu(sums) if silu else sums).to(x.dtype)
        for t, saved in _saves(tokens, save_slots):
            state[saved] = rows[t + 1 - tokens.start :][: taps - 1]
        state[slot] = rows[len(rows) - (taps - 1) :]
    return out


def reference_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    state: Tensor,
    state_slots: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    normalize: bool = False,
    delta: bool = True,
    save_slots: Tensor | None = None,
) -> Tensor:
    """:func:`torch_armllm.ops.recurrent.gated_delta_rule` in plain float32 torch."""
    repeats = v.shape[1] // k.shape[1]
    queries, keys = (x.float().repeat_interleave(repeats, 1) for x in (q, k))
    if normalize:
        queries, keys = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (queries, keys))
    queries = queries * scale
    decay = gate.float().exp()
    decay = (decay if gate.ndim == 3 else decay[..., None])[..., None]  # (T, value_heads, key_size or 1, 1)
    out, saves = torch.empty_like(v), dict(_saves(slice(0, len(v)), save_slots))
    for slot, tokens, is_new in _sequences(state_slots, query_start, seq_lens):
        own = torch.zeros_like(state[slot]).float() if is_new else state[slot].float()
        for t in range(tokens.start, tokens.stop):
            own = own * decay[t]
            remembered = (own * keys[t][..., None]).sum(-2)
            added = (v[t].float() - remembered if delta else v[t].float()) * beta[t].float()[:, None]
            own = own + keys[t][..., None] * added[:, None]
            out[t] = (own * queries[t][..., None]).sum(-2).to(v.dtype)
            own = own.to(state.dtype).float()  # the next token sees the state as it is stored
            if t in saves:
                state[saves[t]] = own
        state[slot] = own
    return out


def reference_selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor | None,
    c: Tensor | None,
    state: Tensor,
    state_slots: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    normalize: bool = False,
    save_slots: Tensor | None = None,
) -> Tensor:
    """:func:`torch_armllm.ops.recurrent.selective_scan` in plain float32 torch."""
    ones = torch.ones(x.shape[0], a.shape[0])
    added, read = ((ones if part is None else part.float())[..., None] for part in (b, c))  # (T, N, 1)
    decay = (dt.float()[:, None] * a).exp()  # (T, N, channels)
    out, saves = torch.empty_like(x), dict(_saves(slice(0, len(x)), save_slots))
    for slot, tokens, is_new in _sequences(state_slots, query_start, seq_lens):
        own = torch.zeros_like(state[slot]).float() if is_new else state[slot].float()
        for t in range(tokens.start, tokens.stop):
            factors = (
                (1 - decay[t] * decay[t]).sqrt() if normalize and not (is_new and t == tokens.start) else 1
            )
            own = decay[t] * own + added[t] * x[t].float() * factors
            out[t] = (read[t] * own).sum(0).to(x.dtype)
            own = own.to(state.dtype).float()
            if t in saves:
                state[saves[t]] = own
        state[slot] = own
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
