"""Marker ops of recurrent layers, in place of the functions that transformers' families share.

Families define these functions under the same names and signatures, as kernels of other libraries replace
them.  Without a cache a recurrent layer is a row of such calls between linear layers and elementwise
operators.  A call that the marker cannot express is traced as transformers computes it, and so is a function
of the same name that computes something else.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

import torch_armllm.capture.markers.recurrent_ops  # noqa: F401  (registers the marker ops)
from torch_armllm.capture.markers.replaced_functions import replaced_functions

_SILU = ("silu", "swish")


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
        if _is_packed(kwargs):
            return original(hidden_states, weight, bias, activation, **kwargs)
        out = torch.ops.armllm.convolve_tokens(hidden_states, weight, bias, activation in _SILU)
        return out if activation in (None, *_SILU) else ACT2FN[activation](out)

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
                query,
                key,
                value,
                g,
                beta,
                chunk_size,
                initial_state,
                output_final_state,
                use_qk_l2norm_in_kernel,
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
                hidden_states,
                dt,
                A,
                B,
                C,
                chunk_size,
                D,
                dt_bias,
                initial_states,
                dt_softplus,
                dt_limit,
                return_final_states,
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


def _mark_selective_scan(original: Callable[..., Any]) -> Callable[..., Any]:
    def scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        use_mambapy: bool = False,
        use_associative_scan: bool = False,
        **kwargs: Any,
    ) -> Any:
        if return_last_state or _is_packed(kwargs):
            return original(
                hidden_states,
                dt,
                A,
                B,
                C,
                D,
                z,
                delta_bias,
                delta_softplus,
                return_last_state,
                use_mambapy,
                use_associative_scan,
                **kwargs,
            )
        x, dt, b, c = (by_channel.transpose(1, 2) for by_channel in (hidden_states, dt, B, C))
        if delta_bias is not None:
            dt = dt + delta_bias.to(dt.dtype)
        if delta_softplus:
            dt = F.softplus(dt)
        out = torch.ops.armllm.scan_channels(dt.float() * x.float(), dt, A.float().T, b, c)
        if D is not None:
            out = out + x * D
        if z is not None:
            out = out * F.silu(z.transpose(1, 2))
        return out.transpose(1, 2)

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


def _selective_scan_probes() -> list[tuple[Any, ...]]:
    x, dt, a, b, c, d, z, bias = (
        torch.randn(sizes, generator=_generator())
        for sizes in ((1, 6, 9), (1, 6, 9), (6, 4), (1, 4, 9), (1, 4, 9), (6,), (1, 6, 9), (6,))
    )
    return [(x, dt, -a.exp(), b, c, d, z, bias, True), (x, dt.abs(), -a.exp(), b, c)]


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
    "mamba_selective_scan": _Marker(_mark_selective_scan, _selective_scan_probes),
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
    with replaced_functions(model, _MARKERS, _replacement):
        yield
