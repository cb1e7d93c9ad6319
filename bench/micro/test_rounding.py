"""The search for steps with the groups and candidates of the default scheme."""

from __future__ import annotations

from typing import Any

import torch

from torch_armllm.ops.rounding import search_steps

ROWS, GROUPS, SIZE, CANDIDATES = 64, 64, 32, 12


def test_search_steps(measure: Any) -> None:
    values, factors = torch.randn(ROWS, GROUPS, SIZE), torch.rand(GROUPS, SIZE)
    steps = 0.2 + 0.1 * torch.rand(CANDIDATES, ROWS, GROUPS)
    zeros = torch.randint(6, 10, steps.shape).float()
    # a product, two bounds, a rounding, an error, its factor and its square
    measure(
        lambda: search_steps(values, steps, zeros, factors, 0, 15),
        read=values.nbytes,
        operations=8 * CANDIDATES * values.numel(),
    )
