"""Random Mixture-of-Experts layers, and inputs for them, for the tests of `int4_moe`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.packed_weights import random_integers, random_multipliers
from torch_armllm.ops import linear, moe, variants

VARIANTS = variants.machine().distinct("linear", "activation", "moe")


def random_experts(experts: int, rows: int, columns: int, scheme: str, generator: torch.Generator) -> Tensor:
    """Returns packed random weights (experts, rows, columns) that keep the magnitude of their inputs."""
    traits = linear.traits_of(scheme)
    span = traits.span
    q = random_integers(traits.values, (experts, rows, columns), generator=generator)
    shape = (experts, rows, -(-columns // span)) if span else (experts, rows)
    most = 70 if traits.is_int8 else 40 if traits.multipliers else 4.6
    scales = (0.5 + torch.rand(shape, generator=generator)) * (1 / most / columns**0.5)
    if scheme == "i8":
        return linear.pack_int8(q, scales)
    groups = (experts, rows, -(-columns // 32))
    multipliers = random_multipliers(scheme, *groups, generator=generator)
    zeros = None
    if traits.zero_points:
        zero_shape = groups if traits.has_narrow_zero_points else shape
        zeros = torch.randint(6, 10, zero_shape, generator=generator, dtype=torch.uint8)
    offsets = None
    if traits.offsets:
        offsets = torch.randn(shape, generator=generator) / columns**0.5 / 4
    if traits.bf16_scales:
        scales = scales.bfloat16()
    return linear.pack_int4(q, multipliers, scales, scheme, zeros, offsets)


@dataclass
class MoeLayer:
    """Packed experts of a layer, and the options of the op.

    Attributes:
        gate_up: gate and up weights, in alternating panels; up weights only if not ``gated``.
        down: down weights.
        hidden: size of inputs and outputs.
        intermediate: outputs of gate and of up.
        scheme: quantization scheme of all weights.
        activation: name of the activation.
        gate_up_bias: bias (experts, 2, intermediate); (experts, intermediate) if not ``gated``.
        down_bias: bias (experts, hidden).
        gated: has a gate.
        weigh_input: the routing weights scale the inputs instead of the outputs.
        identity_experts: ids after the experts' whose result is the token itself.
        rotated: the weights are those of rotated inputs.
    """

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
    identity_experts: int = 0
    rotated: bool = False

    def options(self) -> dict[str, object]:
        """Returns the keyword arguments of `int4_moe` that do not depend on tokens."""
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
            "identity_experts": self.identity_experts,
            "rotated": self.rotated,
        }

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Returns the output of the op, by the selected variant."""
        return moe.int4_moe(x, ids, weights, **self.options())

    def reference(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Returns the output of the reference implementation."""
        return moe.reference_int4_moe(x, ids, weights, **self.options())


def make_layer(
    experts: int = 4,
    hidden: int = 64,
    intermediate: int = 48,
    scheme: str = "g32i",
    activation: str = "silu",
    bias: torch.dtype | None = None,
    seed: int = 0,
) -> MoeLayer:
    """Makes a gated layer with random weights, and random biases of dtype ``bias``."""
    generator = torch.Generator().manual_seed(seed)
    gate = random_experts(experts, intermediate, hidden, scheme, generator)
    up = random_experts(experts, intermediate, hidden, scheme, generator)
    down = random_experts(experts, hidden, intermediate, scheme, generator)
    layer = MoeLayer(linear.interleave_panels(gate, up), down, hidden, intermediate, scheme, activation)
    if bias is not None:
        layer.gate_up_bias = torch.randn(experts, 2, intermediate, generator=generator).to(bias)
        layer.down_bias = torch.randn(experts, hidden, generator=generator).to(bias)
    return layer


def make_input(
    layer: MoeLayer, tokens: int, top_k: int, dtype: torch.dtype = torch.float32, seed: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns random tokens, the ids of ``top_k`` distinct experts per token, and normalized weights."""
    generator = torch.Generator().manual_seed(seed)
    experts = layer.gate_up.shape[0] + layer.identity_experts
    x = torch.randn(tokens, layer.hidden, generator=generator).to(dtype)
    ids = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :top_k].contiguous()
    weights = torch.rand(tokens, top_k, generator=generator) + 0.1
    return x, ids, weights / weights.sum(-1, keepdim=True)


def run_all_variants(layer: MoeLayer, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Returns the output; asserts that it is bit-identical in all variants."""
    results = []
    for name in VARIANTS:
        with variants.use(name):
            results.append(layer(x, ids, weights))
    for name, result in zip(VARIANTS, results, strict=True):
        torch.testing.assert_close(result, results[0], rtol=0, atol=0, equal_nan=True, msg=f"{name} differs")
    return results[0]


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Asserts a largest difference of ``tolerance`` times the largest expected value."""
    largest = expected.float().abs().max().clamp(min=1e-6)
    error = (actual.float() - expected.float()).abs().max() / largest
    assert error <= tolerance, f"differs by {error:.2e} of the largest value"
