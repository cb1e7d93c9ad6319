"""Detection of experts modules: weights by their declared layout, activations by numerical comparison."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor, nn

from torch_armllm.hf.expert_layout import ExpertLayout, parameter
from torch_armllm.ops.activation import ACTIVATIONS, FUNCTIONS


def _is_decorated(module: nn.Module) -> bool:
    """True if transformers' ``use_experts_implementation`` decorates the module's class."""
    flags = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
    return hasattr(type(module), "_apply_gate") and all(hasattr(module, flag) for flag in flags)


def is_experts(module: nn.Module) -> bool:
    """True if a module holds the weights of several experts, with transformers' interface or without."""
    pair = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    return _is_decorated(module) or all(isinstance(w, Tensor) and w.dim() == 3 for w in pair)


def read_layout(module: nn.Module) -> ExpertLayout | str:
    """Returns the layout of an experts module, or the reason for which the fused op does not support it."""
    if not _is_decorated(module):
        return _recognize_batched(module) or "what it computes is not what a fused op does"
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are spread over several processes"
    if getattr(module, "has_post_expert_norm", False):
        return "experts followed by a norm of their own have no fused op"
    layout = ExpertLayout(
        bool(module.is_transposed),
        not module.is_concatenated,
        bool(module.has_bias),
        "silu",
        gated=bool(module.has_gate),
    )
    missing = [name for name in layout.weights if not isinstance(getattr(module, name, None), Tensor)]
    if missing:
        return f"it has no parameter {missing[0]}"
    activation = _recognize(module, layout.gated)
    if activation is None:
        return "its activation has no fused op"
    return replace(layout, activation=activation[0], limit=activation[1])


_FAR = (20.0, 60.0, 200.0, 1000.0)
"""Points outside the usual range, where clamps become visible."""


def _candidates(module: nn.Module) -> Iterator[tuple[str, float]]:
    """Yields all activations, clamping ones with each number of the module as the limit."""
    limits = {
        float(value)
        for value in vars(module).values()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < max(_FAR)
    }
    for name in ACTIVATIONS:
        yield from ((name, limit) for limit in (sorted(limits) if "clamped" in name else [7.0]))


def _recognize(module: nn.Module, gated: bool) -> tuple[str, float] | None:
    """Identifies the activation by its values: class names are not enough."""
    points = torch.cat([torch.linspace(-12.0, 12.0, 97), torch.tensor([*_FAR, *(-x for x in _FAR)])]).double()
    if gated:
        gate, up = (axis.flatten() for axis in torch.meshgrid(points, points, indexing="ij"))
        # one pair per row: interleaved and concatenated are the same
        function: Callable[[Tensor], Tensor] = module._apply_gate  # type: ignore[assignment]
        joined = torch.stack([gate, up], dim=-1)
    else:
        function, gate, up, joined = module.act_fn, points, points, points[:, None]  # type: ignore[assignment]
    try:
        with torch.no_grad():
            actual = function(joined)[..., 0]
    except Exception:  # noqa: BLE001 - the op does not support gates with another signature
        return None
    for name, limit in _candidates(module):
        expected = FUNCTIONS[name](gate, up, limit)
        # float32 activations lose digits in their tails, and up multiplies the error
        if bool(((actual - expected).abs() <= 1e-5 * (1 + expected.abs() + up.abs())).all()):
            return name, limit
    return None


def _shrunk(module: nn.Module) -> nn.Module | None:
    """Returns a copy with three small random experts, and its size attributes adapted; None if impossible."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    if set(shapes) != {"gate_up_proj", "down_proj"}:
        return None
    (experts, rows, columns), down = shapes["gate_up_proj"], shapes["down_proj"]
    inner, hidden = (down[1], down[2]) if (down[2], 2 * down[1]) == (rows, columns) else (down[2], down[1])
    small = {experts: 3, 2 * inner: 8, inner: 4}
    small.setdefault(hidden, 6)
    twin = copy.copy(module)
    twin.__dict__.update(
        (name, small[value])
        for name, value in vars(module).items()
        if isinstance(value, int) and not isinstance(value, bool) and value in small
    )
    generator = torch.Generator().manual_seed(0)
    twin.__dict__["_parameters"] = {
        name: nn.Parameter(torch.randn([small[n] for n in shape], generator=generator), requires_grad=False)
        for name, shape in shapes.items()
        if all(n in small for n in shape)
    }
    return twin if len(twin._parameters) == 2 else None


def _recognize_batched(module: nn.Module) -> ExpertLayout | None:
    """Detects batched experts by running a small copy."""
    small_copy = _shrunk(module)
    if small_copy is None:
        return None
    tokens, (gate_up, down) = 5, (parameter(small_copy, name) for name in ("gate_up_proj", "down_proj"))
    for transposed, interleaved in product((True, False), (False, True)):
        plain = ExpertLayout(transposed, interleaved, False, "silu", batched=True)
        hidden = plain.outer(down)[0].shape[0]
        x = torch.randn(3, tokens, hidden, generator=torch.Generator().manual_seed(1))
        try:
            actual = small_copy(x.reshape(-1, hidden)).reshape(3, tokens, hidden)
            gates, ups = (
                torch.stack([row @ w.t() for row, w in zip(x, part, strict=True)])
                for part in plain.inner(gate_up)
            )
        except Exception:  # noqa: BLE001 - not batched, or another layout
            continue
        for name, limit in _candidates(module):
            between = FUNCTIONS[name](gates, ups, limit)
            expected = torch.stack([row @ w.t() for row, w in zip(between, plain.outer(down), strict=True)])
            if torch.allclose(actual, expected, rtol=1e-4, atol=1e-4):
                return replace(plain, activation=name, limit=limit)
    return None
