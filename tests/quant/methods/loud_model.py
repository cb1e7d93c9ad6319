"""Models in which a few channels carry far more than the others, as in trained ones."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.models import tiny

OFFSET = ("gemma", "gemma3_text", "nemotron", "qwen3_5_moe_text", "qwen3_next")
"""Models whose norms multiply by 1 + weight."""


def loud(kind: str, **overrides: Any) -> Any:
    """A tiny model whose norms make one channel in 16 far louder than the others."""
    model = tiny(kind, **overrides)
    offset = 1.0 if kind in OFFSET else 0.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ("norm" in name or "ln_" in name) and name.endswith("weight"):
                factors = torch.where(torch.arange(len(parameter)) % 16 == 3, 12.0, 0.5)
                parameter.copy_((offset + parameter) * factors - offset)
    return model
