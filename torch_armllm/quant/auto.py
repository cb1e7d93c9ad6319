"""The choice that ``quantization="auto"`` stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_armllm.quant.recipe import Recipe


def resolve_auto(quantization: str | Recipe | None, predicts_tokens: bool = True) -> str | Recipe | None:
    """Returns ``int4`` for models that predict tokens, ``int8`` for others; every other choice as it is."""
    if quantization != "auto":
        return quantization
    return "int4" if predicts_tokens else "int8"
