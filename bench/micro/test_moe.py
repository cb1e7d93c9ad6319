"""int4_moe, with adapters or not, in the shape of Qwen3-30B-A3B: hidden 2048, 128 experts of 768, top-8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torch_armllm.ops import linear, lora, moe

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 2048, 768, 128, 8


def random_panels(rows: int, columns: int) -> Tensor:
    """Returns random panels: any nibbles and multipliers are valid, only the scales must be finite."""
    layout = linear.panel_layout("g32i", columns)
    shape = (EXPERTS, linear.panel_count(rows), layout.bytes)
    panels = torch.randint(0, 256, shape, dtype=torch.uint8)
    scales = torch.full((*shape[:2], 16), 1 / 40 / columns**0.5)
    panels[..., :64] = scales.view(torch.uint8)
    return panels


@pytest.fixture(scope="module")
def experts() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return random_panels(2 * INTERMEDIATE, HIDDEN), random_panels(HIDDEN, INTERMEDIATE)


@pytest.mark.parametrize("tokens", [1, 4, 16, 64, 512])
@pytest.mark.parametrize("routing", ["spread", "one"])
def test_int4_moe(measure: Any, experts: tuple[Tensor, Tensor], tokens: int, routing: str) -> None:
    gate_up, down = experts
    x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16)
    # Every call chooses other experts, so that a token's experts come from memory and not from a cache.
    choices = [torch.rand(tokens, EXPERTS).argsort(-1)[:, :TOP_K] for _ in range(16)]
    if routing == "one":
        choices = [torch.arange(TOP_K).expand(tokens, TOP_K) + 8 * i for i in range(16)]
    weights = torch.full((tokens, TOP_K), 1 / TOP_K)
    calls = 0

    def call() -> Tensor:
        nonlocal calls
        calls += 1
        return moe.int4_moe(x, choices[calls % 16], weights, gate_up, down, INTERMEDIATE)

    used = sum(int(c.unique().numel()) for c in choices) / 16
    expert_bytes = (gate_up[0].numel() + down[0].numel()) * used
    measure(call, read=expert_bytes, operations=tokens * TOP_K * 3 * 2 * HIDDEN * INTERMEDIATE)


@pytest.mark.parametrize("tokens", [1, 4, 64, 512])
@pytest.mark.parametrize("adapters", [0, 1, 4])
@pytest.mark.parametrize("integers", [True, False], ids=["int8", "bfloat16"])
def test_int4_moe_lora(
    measure: Any, experts: tuple[Tensor, Tensor], tokens: int, adapters: int, integers: bool
) -> None:
    gate_up, down = experts
    slots, rank = max(adapters, 1), 16
    x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16)
    choices = [torch.rand(tokens, EXPERTS).argsort(-1)[:, :TOP_K] for _ in range(16)]
    weights = torch.full((tokens, TOP_K), 1 / TOP_K)

    def pair(inputs: int, outputs: int, parts: int) -> tuple[Tensor, Tensor]:
        a = torch.randn(1, 1, rank, inputs) * 0.01
        b = lora.lora_blocks(torch.randn(1, 1, parts, rank, outputs) * 0.01)
        packed = [lora.lora_integers(f) if integers else f.bfloat16() for f in (a, b)]
        one, other = (f.expand(slots, EXPERTS, *f.shape[2:]).contiguous() for f in packed)
        return one, other

    ranks = torch.full((slots,), rank, dtype=torch.int32)
    rows = torch.arange(tokens, dtype=torch.int32) % slots if adapters else torch.full((tokens,), -1).int()
    inner, outer = pair(HIDDEN, INTERMEDIATE, 2), pair(INTERMEDIATE, HIDDEN, 1)
    factors = moe.ExpertAdapters(*inner, ranks, *outer, ranks, rows)
    calls = 0

    def call() -> Tensor:
        nonlocal calls
        calls += 1
        return moe.int4_moe_lora(x, choices[calls % 16], weights, gate_up, down, INTERMEDIATE, factors)

    used = sum(int(c.unique().numel()) for c in choices) / 16
    measure(call, read=(gate_up[0].numel() + down[0].numel()) * used)
