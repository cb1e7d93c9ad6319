"""The choice that ``quantization="auto"`` stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_armllm.quant.recipe import Recipe


def resolve_auto(
    quantization: str | Recipe | None, predicts_tokens: bool = True, packed: bool = False
) -> str | Recipe | None:
    """Returns what ``auto`` stands for; every other choice as it is.

    It is ``int4`` for models that predict tokens, ``int8`` for others, and None for packed weights, which
    stay as they are.
    """
    if quantization != "auto":
        return quantization
    if packed:
        return None
    return "int4" if predicts_tokens else "int8"
