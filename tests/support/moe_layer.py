"""Random experts and what comes to them, for the tests of int4_moe."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_armllm.ops import linear, moe, variants

VARIANTS = variants.machine().distinct("linear", "activation", "moe")


def packed(experts: int, rows: int, columns: int, scheme: str, random: torch.Generator) -> Tensor:
    """Random experts whose outputs are about as large as their inputs."""
    span, zero_points = linear.group_span(scheme), linear.has_zero_points(scheme)
    low, high = (-128, 128) if linear.is_int8(scheme) else (0, 16) if zero_points else (-8, 8)
    q = torch.randint(low, high, (experts, rows, columns), generator=random, dtype=torch.int8)
    shape = (experts, rows, -(-columns // span)) if span else (experts, rows)
    step = (1 / 70 if linear.is_int8(scheme) else 1 / 40 if scheme == "g32i" else 1 / 4.6) / columns**0.5
    scales = (0.5 + torch.rand(shape, generator=random)) * step
    if scheme == "i8":
        return linear.pack_int8(q, scales)
    multipliers = None
    if scheme == "g32i":
        groups = (experts, rows, -(-columns // 32))
        multipliers = torch.randint(1, 17, groups, generator=random, dtype=torch.uint8)
    zeros = torch.randint(6, 10, shape, generator=random, dtype=torch.uint8) if zero_points else None
    offsets = None
    if linear.has_offsets(scheme):
        offsets = torch.randn(shape, generator=random) / columns**0.5 / 4
    if linear.has_bf16_scales(scheme):
        scales = scales.bfloat16()
    return linear.pack_int4(q, multipliers, scales, scheme, zeros, offsets)


@dataclass
class Layer:
    """The experts of a layer and what the op needs to know of them."""

    gate_up: Tensor
    down: Tensor
    hidden: int
    intermediate: int
    scheme: str = "g32i"
    activation: str = "silu"
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gated: bool = True
    weigh_input: bool = False

    def options(self) -> dict[str, object]:
        return {
            "gate_up": self.gate_up,
            "down": self.down,
            "intermediate": self.intermediate,
            "scheme": self.scheme,
            "activation": self.activation,
            "gate_up_bias": self.gate_up_bias,
            "down_bias": self.down_bias,
            "gated": self.gated,
            "weigh_input": self.weigh_input,
        }

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return moe.int4_moe(x, ids, weights, **self.options())

    def reference(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return moe.reference_int4_moe(x, ids, weights, **self.options())


def make_layer(
    experts: int = 4,
    hidden: int = 64,
    intermediate: int = 48,
    scheme: str = "g32i",
    activation: str = "silu",
    bias: torch.dtype | None = None,
    seed: int = 0,
) -> Layer:
    random = torch.Generator().manual_seed(seed)
    gate = packed(experts, intermediate, hidden, scheme, random)
    up = packed(experts, intermediate, hidden, scheme, random)
    down = packed(experts, hidden, intermediate, scheme, random)
    layer = Layer(linear.interleave_panels(gate, up), down, hidden, intermediate, scheme, activation)
    if bias is not None:
        layer.gate_up_bias = torch.randn(experts, 2, intermediate, generator=random).to(bias)
        layer.down_bias = torch.randn(experts, hidden, generator=random).to(bias)
    return layer


def make_input(
    layer: Layer, tokens: int, top_k: int, dtype: torch.dtype = torch.float32, seed: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    experts = layer.gate_up.shape[0]
    x = torch.randn(tokens, layer.hidden, generator=random).to(dtype)
    ids = torch.rand(tokens, experts, generator=random).argsort(-1)[:, :top_k].contiguous()
    weights = torch.rand(tokens, top_k, generator=random) + 0.1
    return x, ids, weights / weights.sum(-1, keepdim=True)


def on_every_variant(layer: Layer, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The result, which all variants must agree on to the bit."""
    results = []
    for name in VARIANTS:
        with variants.use(name):
            results.append(layer(x, ids, weights))
    for name, result in zip(VARIANTS, results, strict=True):
        torch.testing.assert_close(result, results[0], rtol=0, atol=0, equal_nan=True, msg=f"{name} differs")
    return results[0]


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    top = expected.float().abs().max().clamp(min=1e-6)
    error = (found.float() - expected.float()).abs().max() / top
    assert error <= tolerance, f"differs by {error:.2e} of the largest value"
