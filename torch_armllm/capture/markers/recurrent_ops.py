"""Marker ops of recurrent layers: their schemas, and what they compute on one sequence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx

import torch_armllm.capture.markers.compression  # noqa: F401  (registers a marker op)
from torch_armllm.capture.markers.declare import marker


@marker(
    "convolve_tokens(Tensor x, Tensor weight, Tensor? bias, bool silu) -> Tensor",
    lambda a: torch.empty_like(a.x, memory_format=torch.contiguous_format),
)
def convolve_tokens(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """Convolves each channel of one sequence with its last ``taps`` tokens; the reference implementation.

    Args:
        x: ``(1, channels, T)``.
        weight: ``(channels, taps)``, the newest token's tap last.
        bias: ``(channels,)`` or None.
        silu: applies SiLU to the sums.

    Returns:
        ``(1, channels, T)`` in the dtype of ``x``.
    """
    channels, taps = weight.shape
    if x.shape[2] == 0:  # torch does not convolve nothing
        return x.clone()
    # in the dtypes of transformers' function, so that captured results differ from the model's by little
    out = F.conv1d(x.to(weight.dtype), weight[:, None], bias, padding=taps - 1, groups=channels)
    out = out[..., : x.shape[2]]
    return (F.silu(out) if silu else out).to(x.dtype).contiguous()


@marker(
    "delta_rule(Tensor q, Tensor k, Tensor v, Tensor gate, Tensor beta, float scale, bool normalize,"
    " bool delta=True) -> Tensor",
    lambda a: a.v.new_empty(a.v.shape),
)
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    scale: float,
    normalize: bool,
    delta: bool = True,
) -> Tensor:
    """Computes the gated delta rule of one sequence token by token; the reference implementation.

    Args:
        q: ``(1, T, key_heads, key_size)``.
        k: likewise.
        v: ``(1, T, value_heads, value_size)``.
        gate: logarithms of the state's factors, ``(1, T, value_heads)``, or
            ``(1, T, value_heads, key_size)`` for a factor of each key channel.
        beta: ``(1, T, value_heads)``.
        scale: factor of ``q``.
        normalize: divides q and k by ``sqrt(Σx² + 1e-6)`` first.
        delta: False to add values as they are, as Mamba-2 does.

    Returns:
        ``(1, T, value_heads, value_size)`` in the dtype of ``v``.
    """
    repeats = v.shape[2] // k.shape[2]
    rows = [x.float()[0].repeat_interleave(repeats, 1) for x in (q, k)]
    if normalize:
        rows = [x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in rows]
    queries, keys = rows
    values, factors = v.float()[0], gate.float()[0].exp()
    if factors.dim() == 2:
        factors = factors[..., None]
    state = keys.new_zeros(*keys.shape[1:], values.shape[-1])
    out = torch.empty_like(values)
    for t in range(len(values)):
        state = state * factors[t][..., None]
        key = keys[t][..., None]
        value = values[t] - (state * key).sum(1) if delta else values[t]
        state = state + key * (value * beta[0, t, :, None].float())[:, None]
        out[t] = (state * (queries[t] * scale)[..., None]).sum(1)
    return out[None].to(v.dtype)


@marker(
    "scan_channels(Tensor x, Tensor dt, Tensor a, Tensor? b, Tensor? c, bool normalize=False) -> Tensor",
    lambda a: a.x.new_empty(a.x.shape),
)
def scan_channels(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor | None, c: Tensor | None, normalize: bool = False
) -> Tensor:
    """Computes ``h = exp(dt · a) · h + b · x`` and ``Σ c · h`` token by token; the reference implementation.

    Args:
        x: ``(1, T, channels)``.
        dt: likewise.
        a: ``(N, channels)`` float32, constant.
        b: ``(1, T, N)``, or None for ones.
        c: likewise.
        normalize: multiplies x by ``sqrt(1 - exp(2 · dt · a))``, except in the first token.

    Returns:
        ``(1, T, channels)`` in the dtype of ``x``.
    """
    decay = (dt.float()[0, :, None] * a).exp()  # (T, N, channels)
    added = x.float()[0, :, None] if b is None else b.float()[0, ..., None] * x.float()[0, :, None]
    if normalize:
        factors = (1 - decay * decay).sqrt()
        factors[:1] = 1
        added = added * factors
    state = torch.zeros_like(a)
    out = torch.empty(x.shape[1:])
    for t in range(len(out)):
        state = decay[t] * state + added[t]
        out[t] = (state if c is None else c[0, t, :, None].float() * state).sum(0)
    return out[None].to(x.dtype)


MARKERS = (
    torch.ops.armllm.convolve_tokens.default,
    torch.ops.armllm.delta_rule.default,
    torch.ops.armllm.scan_channels.default,
    torch.ops.armllm.window_entries.default,
)
"""The marker ops of recurrent layers."""


def markers_of(module: fx.GraphModule) -> list[fx.Node]:
    """Returns the recurrent markers of a captured graph, in order."""
    return [node for node in module.graph.nodes if node.target in MARKERS]
