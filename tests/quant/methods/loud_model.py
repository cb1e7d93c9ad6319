"""Models in which a few channels carry far more than the others, as in trained ones."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.models import tiny


def loud(kind: str) -> Any:
    """A tiny model whose norms make one channel in 16 far louder than the others."""
    model = tiny(kind)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ("norm" in name or "ln_" in name) and name.endswith("weight"):
                parameter.mul_(torch.where(torch.arange(len(parameter)) % 16 == 3, 12.0, 0.5))
    return model
