"""Markers in place of modules that write their recurrence in their own ``forward``.

A module is recognized by what it computes: its parts suggest a replacement, and it is replaced if both return
the same for a few random tokens.  A module that computes something else stays as it is.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_armllm.capture.markers.recurrent_ops  # noqa: F401  (registers the marker ops)
from torch_armllm.hf.cache_names import given_cache
from torch_armllm.hf.replacements import replaced

Forward = Callable[..., Any]
_TOKENS = 9
_PROBES = 3


def _arguments(module: Any) -> list[str]:
    """Returns the names of a class's arguments: a forward of the instance may be a wrapper."""
    return list(inspect.signature(type(module).forward).parameters)[1:]  # after self


def _lightning_attention(module: Any) -> Forward:
    """Returns the forward of lightning attention: the delta rule without a delta, with a constant decay."""
    gate = -module.slope_rate.float().flatten()  # of each head
    beta = torch.ones_like(gate)
    names = _arguments(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        if named.get("attention_mask") is not None or given_cache(named) is not None:
            return type(module).forward(module, *args, **kwargs)
        hidden_states = named["hidden_states"]
        of_tokens = (1, hidden_states.shape[1], len(gate))
        q, k, v = module.act_fn(module.qkv_proj(hidden_states)).view(*of_tokens, -1).chunk(3, -1)
        decays, shares = (x.expand(of_tokens) for x in (gate, beta))
        out = torch.ops.armllm.delta_rule(q, k, v, decays, shares, 1.0, False, False)
        out = torch.sigmoid(module.output_gate(hidden_states)) * module.norm(out.reshape(*of_tokens[:2], -1))
        return module.out_proj(out), None

    return forward


def _gated_linear_recurrence(module: Any) -> Forward:
    """Returns the forward of a real-gated linear recurrent unit: a scan with one state a channel."""

    def gate(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        sums: Tensor = torch.ops.armllm.dense_heads_linear(x, weight.transpose(1, 2)) + bias
        return torch.sigmoid(sums).reshape(1, x.shape[0], -1)

    def forward(activations: Tensor, position_ids: Tensor) -> Tensor:
        heads = activations.view(activations.shape[1], len(module.input_gate_weight), -1)
        opened = gate(heads, module.input_gate_weight, module.input_gate_bias)
        kept = gate(heads, module.recurrent_gate_weight, module.recurrent_gate_bias)
        rate = -8.0 * F.softplus(module.recurrent_param.float())
        out: Tensor = torch.ops.armllm.scan_channels(activations * opened, kept, rate[None], None, None, True)
        return out

    return forward


def _convolution(module: Any) -> Forward:
    """Returns the forward of a depthwise convolution with so many zeros on both sides that it is causal.

    It returns the results of the tokens, without those after the last, which a causal model drops.
    """
    if module.groups != module.in_channels or module.in_channels != module.out_channels:
        raise ValueError("channels are mixed")

    def forward(x: Tensor) -> Tensor:
        out: Tensor = torch.ops.armllm.convolve_tokens(x, module.weight.squeeze(1), module.bias, False)
        return out

    return forward


def _mixed_convolution(module: Any) -> Forward:
    """Returns the forward of a convolution whose taps are a constant and a token's own number for each head.

    The constant taps are one convolution.  A single tap of 1 shifts the tokens, for products with their own.
    """
    taps, channels = module.static_weight.shape
    heads = module.num_heads
    shifts = [
        F.one_hot(torch.tensor(taps - 1 - lag), taps).float().expand(channels, -1) for lag in range(taps)
    ]

    names = _arguments(module)

    def convolve(columns: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = torch.ops.armllm.convolve_tokens(columns, weight, None, False)
        return out.transpose(1, 2)

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        if named.get("conv_mask") is not None or given_cache(named) is not None:
            result: Tensor = type(module).forward(module, *args, **kwargs)
            return result
        hidden_states, dynamic_input = named["hidden_states"], named["dynamic_input"]
        x = hidden_states.float()
        columns, by_head = x.transpose(1, 2), (1, x.shape[1], heads, channels // heads)
        own = module.weight_proj(dynamic_input).float().view(1, x.shape[1], heads, taps)
        total = convolve(columns, module.static_weight.float().flip(0).T) + x
        for lag, shift in enumerate(shifts):
            shifted = convolve(columns, shift) if lag else x
            total = total + (shifted.reshape(by_head) * own[..., lag : lag + 1]).reshape(x.shape)
        mixed: Tensor = (total / math.sqrt(2 * taps + 1)).to(hidden_states.dtype)
        return mixed

    return forward


def _two_inputs(module: Any, seed: int) -> tuple[Any, ...]:
    return _random(module.static_weight.shape[1], seed), _random(module.weight_proj.in_features, seed).cos()


def _hidden(module: Any, seed: int) -> tuple[Any, ...]:
    return (_random(module.qkv_proj.in_features, seed), None, None)


def _activations(module: Any, seed: int) -> tuple[Any, ...]:
    return (_random(module.recurrent_param.shape[0], seed), torch.arange(_TOKENS)[None])


def _channels(module: Any, seed: int) -> tuple[Any, ...]:
    return (_random(module.in_channels, seed).transpose(1, 2),)


def _random(size: int, seed: int) -> Tensor:
    return torch.randn(1, _TOKENS, size, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class _Replacement:
    """Replacement of the forward of modules.

    Attributes:
        parts: attributes that such a module has.
        forward: returns the forward of a module.
        probe: returns random arguments for which a module has to return what its replacement does.
    """

    parts: tuple[str, ...]
    forward: Callable[[Any], Forward]
    probe: Callable[[Any, int], tuple[Any, ...]]

    def of(self, module: nn.Module) -> Forward | None:
        """Returns the forward that replaces a module's own; None if the module computes something else.

        In a quantized layer, float32 rounding may move an activation to the next integer, which changes the
        results of its token; so the module and its replacement have to agree on one of a few random inputs.
        """
        if not all(hasattr(module, part) for part in self.parts):
            return None
        try:
            forward = self.forward(module)
            alike = any(self._agree(module, forward, seed) for seed in range(_PROBES))
        except Exception:  # noqa: BLE001 - a module with other arguments
            return None
        return forward if alike else None

    def _agree(self, module: nn.Module, forward: Forward, seed: int) -> bool:
        dtype = next(module.parameters()).dtype
        arguments = [
            x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
            for x in self.probe(module, seed)
        ]
        expected, found = (f(*arguments) for f in (module.forward, forward))
        expected, found = (x[0] if isinstance(x, tuple) else x for x in (expected, found))
        expected = expected[tuple(slice(size) for size in found.shape)]
        if expected.shape != found.shape:
            return False
        bound = (1e-3 if dtype == torch.float32 else 5e-2) * float(expected.float().abs().max())
        return bool(((found - expected).float().abs() <= bound).all())


_REPLACEMENTS = (
    _Replacement(("kernel_size", "groups", "in_channels"), _convolution, _channels),
    _Replacement(
        ("slope_rate", "qkv_proj", "act_fn", "output_gate", "norm", "out_proj"),
        _lightning_attention,
        _hidden,
    ),
    _Replacement(("static_weight", "weight_proj", "num_heads"), _mixed_convolution, _two_inputs),
    _Replacement(
        ("recurrent_param", "input_gate_weight", "recurrent_gate_weight"),
        _gated_linear_recurrence,
        _activations,
    ),
)


def mark_recurrent_modules(model: nn.Module) -> AbstractContextManager[None]:
    """Lets modules with a recurrence of their own insert marker ops while the context lasts."""
    return replaced(model, "forward", _forward_of)


def _forward_of(module: nn.Module) -> Forward | None:
    found = (replacement.of(module) for replacement in _REPLACEMENTS)
    return next((forward for forward in found if forward is not None), None)
