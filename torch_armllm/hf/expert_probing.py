"""Recognition of experts without transformers' interface: a small copy runs on random numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor, nn

from torch_armllm.hf.expert_layout import ExpertLayout, parameter
from torch_armllm.ops.activation import ACTIVATIONS, FUNCTIONS

FAR = (20.0, 60.0, 200.0, 1000.0)
"""Points outside the usual range, where clamps become visible."""
_TOKENS = 20


def candidates(module: nn.Module) -> Iterator[tuple[str, float, float]]:
    """Yields all activations with their limits: each number of the module, or pairs of them."""
    numbers = {
        float(value)
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < max(FAR)
    }
    limits = sorted(numbers)
    for name in ACTIVATIONS:
        if "softcapped" in name:
            yield from ((name, *pair) for pair in product(limits, limits))
        else:
            yield from ((name, limit, 7.0) for limit in (limits if "clamped" in name else [7.0]))


def recognize_undecorated(module: nn.Module) -> ExpertLayout | None:
    """Returns the layout of experts whose class does not declare it; None if they compute something else."""
    small_copy = _shrunk(module)
    if small_copy is None:
        return None
    gate_up, down = (parameter(small_copy, name) for name in ("gate_up_proj", "down_proj"))
    identities = len(gate_up) - len(down)
    for kind, transposed, interleaved in product((_batched, _routed), (True, False), (False, True)):
        plain = ExpertLayout(transposed, interleaved, False, "silu", batched=kind is _batched)
        plain = replace(plain, identity_experts=identities)
        try:
            rows, actual, combine = kind(small_copy, plain.outer(down)[0].shape[0], len(gate_up))
            gates, ups = (
                torch.stack([rows @ matrix.t() for matrix in part]) for part in plain.inner(gate_up)
            )
        except Exception:  # noqa: BLE001 - called in another way, or of another layout
            continue
        for name, *bounds in candidates(module):
            between = FUNCTIONS[name](gates, ups, *bounds)
            results = [row @ w.t() for row, w in zip(between, plain.outer(down), strict=True)]
            expected = combine(torch.stack(results + [rows] * identities))
            if torch.allclose(actual, expected, rtol=1e-4, atol=1e-4):
                count = parameter(module, "gate_up_proj").shape[0] - parameter(module, "down_proj").shape[0]
                limit, up_limit = bounds
                plain = replace(plain, identity_experts=count)
                return replace(plain, activation=name, limit=limit, up_limit=up_limit)
    return None


_Run = tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]
"""Rows (N, H), a module's result for them, and a function that combines (E, N, H), all experts' results."""


def _batched(module: nn.Module, hidden: int, experts: int) -> _Run:
    """Calls experts with rows for every expert (Llama 4)."""
    x = torch.randn(experts, _TOKENS, hidden, generator=torch.Generator().manual_seed(1)).flatten(0, 1)
    which = torch.arange(experts).repeat_interleave(_TOKENS)
    return x, module(x), lambda results: results[which, torch.arange(len(x))]


def _routed(module: nn.Module, hidden: int, experts: int) -> _Run:
    """Calls experts with rows, and two experts and their weights for each."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(_TOKENS, hidden, generator=generator)
    ids = torch.rand(_TOKENS, experts, generator=generator).argsort(-1)[:, :2]
    weights = torch.rand(_TOKENS, 2, generator=generator) + 0.1

    def combine(results: Tensor) -> Tensor:
        chosen = results[ids, torch.arange(_TOKENS)[:, None]]
        return (chosen * weights[..., None]).sum(1)

    return x, module(x, ids, weights), combine


def _small_sizes(experts: int, total: int, inner: int, hidden: int) -> dict[int, int] | None:
    """Returns a small size for each size; None if one is the size of two things."""
    small = {inner: 4, 2 * inner: 8}
    small_total = small.setdefault(experts, 3)
    if total > experts:
        small_total += small.setdefault(total - experts, 2)
    if small.setdefault(total, small_total) != small_total:
        return None
    small.setdefault(hidden, 6)
    return small


def _shrunk(module: nn.Module) -> nn.Module | None:
    """Returns a copy with few small random experts, and its size attributes adapted; None if impossible."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    if set(shapes) != {"gate_up_proj", "down_proj"}:
        return None
    (total, rows, columns), (experts, *down) = shapes["gate_up_proj"], shapes["down_proj"]
    inner, hidden = (down[0], down[1]) if (down[1], 2 * down[0]) == (rows, columns) else (down[1], down[0])
    small = _small_sizes(experts, total, inner, hidden) if total >= experts else None
    if small is None or any(n not in small for shape in shapes.values() for n in shape):
        return None
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
    }
    return twin
