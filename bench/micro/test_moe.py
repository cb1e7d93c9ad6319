"""int4_moe on the layer shape of Qwen3-30B-A3B: hidden 2048, 128 experts of 768, top-8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torch_armllm.ops import linear, moe

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
