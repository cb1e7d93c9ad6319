"""Marker ops of recurrent layers, in place of the functions that transformers' families share.

Families define these functions under the same names and signatures, as kernels of other libraries replace
them.  Without a cache a recurrent layer is a row of such calls between linear layers and elementwise
operators.  A call that the marker cannot express is traced as transformers computes it, and so is a function
of the same name that computes something else.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

_library = torch.library.Library("armllm", "FRAGMENT")
_library.define("convolve_tokens(Tensor x, Tensor weight, Tensor? bias, bool silu) -> Tensor")
_library.define(
    "delta_rule(Tensor q, Tensor k, Tensor v, Tensor gate, Tensor beta, float scale, bool normalize,"
    " bool delta=True) -> Tensor"
)

_SILU = ("silu", "swish")


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


_library.impl("convolve_tokens", convolve_tokens, "CompositeExplicitAutograd")
_library.impl("delta_rule", delta_rule, "CompositeExplicitAutograd")


@torch.library.register_fake("armllm::convolve_tokens", lib=_library)
def _(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("armllm::delta_rule", lib=_library)
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    scale: float,
    normalize: bool,
    delta: bool = True,
) -> Tensor:
    return v.new_empty(v.shape)


MARKERS = (torch.ops.armllm.convolve_tokens.default, torch.ops.armllm.delta_rule.default)
"""The marker ops of recurrent layers."""


def markers_of(module: fx.GraphModule) -> list[fx.Node]:
    """Returns the recurrent markers of a captured graph, in order."""
    return [node for node in module.graph.nodes if node.target in MARKERS]


def _is_packed(options: dict[str, Any]) -> bool:
    """True if a call separates sequences itself; the functions ignore all other options."""
    return any(options.get(name) is not None for name in ("cu_seqlens", "seq_idx"))


def _mark_conv(original: Callable[..., Any]) -> Callable[..., Any]:
    def conv(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Any:
        if activation not in (None, *_SILU) or _is_packed(kwargs):
            return original(hidden_states, weight, bias, activation, **kwargs)
        return torch.ops.armllm.convolve_tokens(hidden_states, weight, bias, activation in _SILU)

    return conv


def _mark_delta_rule(original: Callable[..., Any]) -> Callable[..., Any]:
    def rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Any:
        if initial_state is not None or output_final_state or _is_packed(kwargs):
            return original(
                *(query, key, value, g, beta, chunk_size, initial_state, output_final_state),
                *(use_qk_l2norm_in_kernel,),
                **kwargs,
            )
        scale = query.shape[-1] ** -0.5
        out = torch.ops.armllm.delta_rule(query, key, value, g, beta, scale, use_qk_l2norm_in_kernel)
        return out, None

    return rule


def _mark_chunk_scan(original: Callable[..., Any]) -> Callable[..., Any]:
    def scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        z: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if initial_states is not None or return_final_states or z is not None or _is_packed(kwargs):
            return original(
                *(hidden_states, dt, A, B, C, chunk_size, D, dt_bias, initial_states, dt_softplus),
                *(dt_limit, return_final_states),
                z=z,
                **kwargs,
            )
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        if dt_softplus:
            dt = F.softplus(dt)
        dt = dt.clamp(*dt_limit).float()
        values = hidden_states.float()
        out = torch.ops.armllm.delta_rule(C, B, values, A.float() * dt, dt, 1.0, False, False)
        return out if D is None else out + D[..., None] * values

    return scan


def _conv_probes() -> list[tuple[Any, ...]]:
    x, weight, bias = (torch.randn(size, generator=_generator()) for size in ((1, 6, 9), (6, 4), (6,)))
    return [(x, weight, bias, "silu"), (x, weight, None, None), (4 * x, weight, bias, None)]


def _delta_rule_probes(*gate_sizes: int) -> list[tuple[Any, ...]]:
    q, k, v, gate, beta = (
        torch.randn(1, 7, *sizes, generator=_generator())
        for sizes in ((2, 8), (2, 8), (2, 5), (2, *gate_sizes), (2,))
    )
    return [(q, k / 4, v, -gate.abs(), beta.sigmoid())]


def _chunk_scan_probes() -> list[tuple[Any, ...]]:
    x, dt, a, b, c, d, bias = (
        torch.randn(sizes, generator=_generator())
        for sizes in ((1, 9, 4, 5), (1, 9, 4), (4,), (1, 9, 2, 8), (1, 9, 2, 8), (4,), (4,))
    )
    return [(x, dt, -a.exp(), b, c, 4, d, bias, None, True), (x, dt.abs(), -a.exp(), b, c / 2, 4)]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@dataclass(frozen=True)
class _Marker:
    """Replacement of a function of transformers' models.

    Attributes:
        mark: returns the replacement of a function.
        probes: returns arguments for which a function has to return what its replacement does.
        options: further arguments of these calls.
    """

    mark: Callable[[Callable[..., Any]], Callable[..., Any]]
    probes: Callable[[], list[tuple[Any, ...]]]
    options: dict[str, Any] = field(default_factory=dict)

    def stands_for(self, function: Callable[..., Any]) -> bool:
        """True if the marker computes what a function computes; other code may use its name."""
        try:
            return all(self._agrees(function, arguments) for arguments in self.probes())
        except Exception:  # noqa: BLE001 - a function with another signature
            return False

    def _agrees(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> bool:
        expected, found = (f(*arguments, **self.options) for f in (function, self.mark(function)))
        if isinstance(expected, tuple):
            expected, found = expected[0], found[0]
        return torch.allclose(found, expected, rtol=1e-3, atol=1e-4)


_NORMALIZED = {"use_qk_l2norm_in_kernel": True}
_MARKERS = {
    "causal_conv1d_fn": _Marker(_mark_conv, _conv_probes),
    "torch_chunk_gated_delta_rule": _Marker(_mark_delta_rule, _delta_rule_probes, _NORMALIZED),
    "chunk_kimi_delta_attention": _Marker(
        _mark_delta_rule, functools.partial(_delta_rule_probes, 8), _NORMALIZED
    ),
    "mamba2_chunk_scan": _Marker(_mark_chunk_scan, _chunk_scan_probes),
}
"""Replacement of each function by its name in the code of transformers' models."""


@functools.cache
@torch.no_grad()
def _replacement(name: str, function: Callable[..., Any]) -> Callable[..., Any] | None:
    marker = _MARKERS[name]
    return marker.mark(function) if marker.stands_for(function) else None


@contextlib.contextmanager
def mark_recurrences(model: nn.Module) -> Iterator[None]:
    """Lets the recurrent layers of a model insert marker ops while the context lasts.

    The functions are replaced for the whole process, so the caller must be alone with the model's code.
    """
    files = {type(module).__module__ for module in model.modules()}
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for file in files:
            names = vars(sys.modules[file]) if file in sys.modules else {}
            for name in _MARKERS:
                original = names.get(name)
                replacement = _replacement(name, original) if callable(original) else None
                if replacement is not None:
                    replaced.append((names, name, original))
                    names[name] = replacement
        yield
    finally:
        for names, name, original in replaced:
            names[name] = original
