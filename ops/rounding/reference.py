"""Slow float32 reference of the search for steps."""

from __future__ import annotations

import torch
from torch import Tensor


def squared_errors(
    values: Tensor, steps: Tensor, zeros: Tensor, factors: Tensor | None, lowest: int, highest: int
) -> Tensor:
    """Returns the squared errors of all candidates ``(candidates, rows, groups)``, in float64."""
    step, zero = steps[..., None], zeros[..., None]
    q = torch.clamp(torch.round(values * (1 / step)), lowest - zero, highest - zero)
    error = q.double() * step - values
    if factors is not None:
        error *= factors
    return error.square().sum(-1)


def reference_search_steps(
    values: Tensor, steps: Tensor, zeros: Tensor, factors: Tensor | None, lowest: int, highest: int
) -> Tensor:
    """Searches in float64; see :func:`torch_armllm.ops.rounding.search_steps`."""
    errors = squared_errors(values, steps, zeros, factors, lowest, highest)
    errors = torch.where(errors.isfinite(), errors, torch.inf)
    if not len(errors):
        return torch.full(values.shape[:2], -1, dtype=torch.int32)
    least, best = errors.min(0)
    return torch.where(least.isfinite(), best, -1).to(torch.int32)
