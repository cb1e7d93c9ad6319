"""Marker op insertion for models that call PyTorch's attention instead of transformers' interface."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_armllm.capture.markers.attention import UnsupportedAttention

IMPLEMENTATION = "sdpa"


def calls_sdpa(base: Any) -> bool:
    """True if a model's code calls PyTorch's attention and not transformers' interface."""
    code = sys.modules[type(base).__module__]
    try:
        source = inspect.getsource(code)
    except (OSError, TypeError):
        return False
    return "scaled_dot_product_attention" in source and "ALL_ATTENTION_FUNCTIONS" not in source


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


@contextlib.contextmanager
def mark_calls() -> Iterator[None]:
    """Replaces causal ``scaled_dot_product_attention`` by the marker op; calls are numbered as layers."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    masks: dict[str, Any] = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
    original, mask = F.scaled_dot_product_attention, masks[IMPLEMENTATION]
    layers = 0

    def mark(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        nonlocal layers
        if attn_mask is not None or not is_causal:
            raise UnsupportedAttention("its attention has an explicit mask or is not causal")
        factor = float(scale) if scale is not None else query.shape[-1] ** -0.5
        out: Tensor = torch.ops.armllm.attention(query, key, value, layers, factor, 0, 0.0, None)
        layers += 1
        return out.transpose(1, 2)

    try:
        masks[IMPLEMENTATION] = _no_mask
        F.scaled_dot_product_attention = mark
        yield
    finally:
        masks[IMPLEMENTATION] = mask
        F.scaled_dot_product_attention = original
