"""Marker of a learned bias of distance that all tokens share, as T5's.

It reaches attention as one number for each pair of tokens.  The module that looks them up inserts a marker
during capture, and attention takes the numbers by distance.  The module is recognized by what it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from torch_armllm.capture.markers.declare import marker
from torch_armllm.hf.replacements import replaced


@marker(
    "relative_bias(Tensor biases, SymInt tokens) -> Tensor",
    lambda a: a.biases.new_empty(1, a.biases.shape[0], a.tokens, a.tokens),
)
def by_distance(biases: Tensor, tokens: int) -> Tensor:
    """Returns a bias for each pair of tokens, ``(1, heads, T, T)``.

    Args:
        biases: ``(heads, 2 · reach + 1)``, from the keys before a token to those after it.
        tokens: their number T.
    """
    reach, positions = biases.shape[1] // 2, torch.arange(tokens)
    away = (positions - positions[:, None]).clamp(-reach, reach)
    return biases[None, :, away + reach]


def _biases_of(module: Any) -> Tensor | None:
    """Returns a module's biases by distance, float32 ``(heads, 2 · reach + 1)``; None if it has none."""
    reach, compute = getattr(module, "relative_attention_max_distance", None), _computer(module)
    if not isinstance(reach, int) or compute is None:
        return None
    try:
        dense = compute(reach + 3, reach + 3).float()
    except Exception:  # noqa: BLE001 - a module with other arguments
        return None
    if dense.dim() != 4 or dense.shape[0] != 1 or dense.shape[2] != reach + 3:
        return None
    biases = torch.cat([dense[0, :, reach, :reach], dense[0, :, 0, : reach + 1]], 1).contiguous()
    return biases if torch.equal(by_distance(biases, reach + 3), dense) else None


def _computer(module: Any) -> Callable[..., Tensor] | None:
    has_table = isinstance(getattr(module, "relative_attention_bias", None), nn.Embedding)
    compute = getattr(module, "compute_bias", None)
    return compute if has_table and callable(compute) else None


def mark_relative_biases(model: nn.Module) -> AbstractContextManager[None]:
    """Lets modules that look up a bias by distance insert the marker while the context lasts."""
    return replaced(model, "compute_bias", _marked)


def _marked(module: Any) -> Callable[..., Tensor] | None:
    """Returns a method that inserts the marker, in the place of a module's own; None: it has no biases."""
    if (biases := _biases_of(module)) is None:
        return None

    def compute_bias(query_length: Any, key_length: Any, **_: Any) -> Tensor:
        bias: Tensor = torch.ops.armllm.relative_bias(biases, query_length)
        return bias

    return compute_bias
