"""Marker ops of recurrent layers, in place of the functions that transformers' families share.

Families define these functions under the same names and signatures, as kernels of other libraries replace
them.  Without a cache a recurrent layer is a row of such calls between linear layers and elementwise
operators.  A call that the marker cannot express is traced as transformers computes it, and so is a function
of the same name that computes something else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

import torch_armllm.capture.markers.recurrent_ops  # noqa: F401  (registers the marker ops)
from torch_armllm.capture.markers.replaced_functions import replaced_functions

_SILU = ("silu", "swish")
_PACKED = ("cu_seqlens", "seq_idx")


def _named(names: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Returns an object with the arguments of a call by name; None stands for those that are left out."""
    order = names.split()
    given = {**dict(zip(order, args, strict=False)), **options}
    return SimpleNamespace(**{**dict.fromkeys((*order, *_PACKED)), **given})


def _is_packed(call: Any) -> bool:
    """True if a call separates sequences itself; the functions ignore all other options."""
    return any(getattr(call, name) is not None for name in _PACKED)


def _mark_conv(original: Callable[..., Any]) -> Callable[..., Any]:
    def conv(*args: Any, **options: Any) -> Any:
        a = _named("hidden_states weight bias activation", args, options)
        if _is_packed(a):
            return original(*args, **options)
        silu = a.activation in _SILU
        out = torch.ops.armllm.convolve_tokens(a.hidden_states, a.weight, a.bias, silu)
        return out if silu or a.activation is None else ACT2FN[a.activation](out)

    return conv


def _mark_delta_rule(original: Callable[..., Any]) -> Callable[..., Any]:
    names = "query key value g beta chunk_size initial_state output_final_state use_qk_l2norm_in_kernel"

    def rule(*args: Any, **options: Any) -> Any:
        a = _named(names, args, options)
        if a.initial_state is not None or a.output_final_state or _is_packed(a):
            return original(*args, **options)
        scale, normalize = a.query.shape[-1] ** -0.5, bool(a.use_qk_l2norm_in_kernel)
        return torch.ops.armllm.delta_rule(a.query, a.key, a.value, a.g, a.beta, scale, normalize), None

    return rule


def _mark_chunk_scan(original: Callable[..., Any]) -> Callable[..., Any]:
    names = "hidden_states dt A B C chunk_size D dt_bias initial_states dt_softplus dt_limit"
    names += " return_final_states z"

    def scan(*args: Any, **options: Any) -> Any:
        a = _named(names, args, options)
        if a.initial_states is not None or a.return_final_states or a.z is not None or _is_packed(a):
            return original(*args, **options)
        dt = a.dt if a.dt_bias is None else a.dt + a.dt_bias.to(a.dt.dtype)
        if a.dt_softplus:
            dt = F.softplus(dt)
        dt = dt.clamp(*(a.dt_limit or (0.0, float("inf")))).float()
        values = a.hidden_states.float()
        out = torch.ops.armllm.delta_rule(a.C, a.B, values, a.A.float() * dt, dt, 1.0, False, False)
        return out if a.D is None else out + a.D[..., None] * values

    return scan


def _mark_selective_scan(original: Callable[..., Any]) -> Callable[..., Any]:
    names = "hidden_states dt A B C D z delta_bias delta_softplus return_last_state"

    def scan(*args: Any, **options: Any) -> Any:
        a = _named(names, args, options)
        if a.return_last_state or _is_packed(a):
            return original(*args, **options)
        x, dt, b, c = (by_channel.transpose(1, 2) for by_channel in (a.hidden_states, a.dt, a.B, a.C))
        if a.delta_bias is not None:
            dt = dt + a.delta_bias.to(dt.dtype)
        if a.delta_softplus:
            dt = F.softplus(dt)
        out = torch.ops.armllm.scan_channels(dt.float() * x.float(), dt, a.A.float().T, b, c)
        if a.D is not None:
            out = out + x * a.D
        if a.z is not None:
            out = out * F.silu(a.z.transpose(1, 2))
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


def mark_recurrences(model: nn.Module) -> AbstractContextManager[None]:
    """Lets the recurrent layers of a model insert marker ops while the context lasts.

    The functions are replaced for the whole process, so the caller must be alone with the model's code.
    """
    return replaced_functions(model, _MARKERS, _replacement)
