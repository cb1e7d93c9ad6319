"""Marker op of multi-head latent attention (MLA): `expand_kv` stays one node of the captured graph.

All MLA families in transformers expand their latents in a method of that name, directly before attention.
``kv_b_proj`` computes each head's value and the part of its key without position; the rotated part, which all
heads share, is concatenated to it.  The method is replaced only if its result equals this computation.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_armllm.capture.markers.declare import marker
from torch_armllm.hf.replacements import replaced
from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.quant.packing import dequantize_matrix


def float_weight(weight: Tensor, rank: int, rows: int, scheme: str) -> Tensor:
    """Returns the float up-projection ``(rows, rank)``; packed panels are dequantized."""
    return dequantize_matrix(weight, rows, rank, scheme) if scheme else weight


def _like_result(a: Any) -> tuple[Tensor, Tensor]:
    sizes = (a.latent.shape[0], a.heads, a.latent.shape[2])
    keys = a.latent.new_empty((*sizes, a.nope_size + a.k_rope.shape[-1]))
    return keys, a.latent.new_empty((*sizes, a.value_size))


@marker(
    "expand_kv(Tensor latent, Tensor k_rope, Tensor weight, int heads, int nope_size, int value_size,"
    " str scheme) -> (Tensor, Tensor)",
    _like_result,
)
def expand_kv(
    latent: Tensor, k_rope: Tensor, weight: Tensor, heads: int, nope_size: int, value_size: int, scheme: str
) -> tuple[Tensor, Tensor]:
    """Computes keys and values of all heads from the latents; the reference implementation.

    Args:
        latent: ``(1, 1, T, rank)``.
        k_rope: ``(1, 1, T, rope_size)``.
        weight: ``(heads · (nope_size + value_size), rank)``, or packed.
        heads: number of heads.
        nope_size: elements of a key without position.
        value_size: elements of a value.
        scheme: quantization scheme of a packed weight; empty for a float weight.

    Returns:
        ``(1, heads, T, nope_size + rope_size)`` and ``(1, heads, T, value_size)``.
    """
    rows = heads * (nope_size + value_size)
    matrix = float_weight(weight, latent.shape[-1], rows, scheme).to(latent.dtype)
    return _join(nn.functional.linear(latent, matrix), k_rope, heads, nope_size)


def _join(expanded: Tensor, k_rope: Tensor, heads: int, nope_size: int) -> tuple[Tensor, Tensor]:
    by_head = expanded[:, 0].unflatten(-1, (heads, -1)).transpose(1, 2)
    keys = torch.cat([by_head[..., :nope_size], k_rope.expand(-1, heads, -1, -1)], -1)
    return keys, by_head[..., nope_size:].contiguous()


@dataclass(frozen=True)
class _Expansion:
    """Replacement of a module's ``expand_kv`` that inserts the marker op."""

    weight: Tensor
    heads: int
    nope_size: int
    value_size: int
    scheme: str

    def __call__(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = torch.ops.armllm.expand_kv(
            kv_nope, k_rot, self.weight, self.heads, self.nope_size, self.value_size, self.scheme
        )
        return keys, values


def is_latent_attention(module: nn.Module) -> bool:
    """True if a module is latent attention."""
    return callable(getattr(module, "expand_kv", None)) and isinstance(
        getattr(module, "kv_b_proj", None), nn.Module
    )


def unsupported_inputs(model: nn.Module) -> str | None:
    """Returns the up-projection that is rotated or has two digits, which its op does not support."""
    for name, module in model.named_modules():
        if is_latent_attention(module) and getattr(module.kv_b_proj, "rotated", False):
            return f"{name}.kv_b_proj is rotated, which the ops of latent attention cannot undo"
        if is_latent_attention(module) and getattr(module.kv_b_proj, "digits", 1) > 1:
            return (
                f"{name}.kv_b_proj quantizes activations to two digits, and the ops of latent attention to "
                "one: set its digits to 1"
            )
    return None


def _expansion(module: Any) -> _Expansion | None:
    """Returns the replacement of a module's ``expand_kv``; None if the method computes something else."""
    linear = module.kv_b_proj
    if getattr(linear, "bias", None) is not None:
        return None
    if isinstance(linear, QuantLinear):
        weight, scheme, dtype = linear.weight_packed, linear.scheme, linear.float_dtype
    elif type(linear) is nn.Linear:
        weight, scheme, dtype = linear.weight, "", linear.weight.dtype
    else:
        return None
    nope_size, value_size = int(module.qk_nope_head_dim), int(module.v_head_dim)
    heads, remainder = divmod(int(linear.out_features), nope_size + value_size)
    random = torch.Generator().manual_seed(0)
    latent, k_rot = (
        torch.randn(1, 1, 2, size, generator=random).to(dtype)
        for size in (int(linear.in_features), int(module.qk_rope_head_dim))
    )
    actual = module.expand_kv(latent, k_rot)
    expected = _join(linear(latent), k_rot, heads, nope_size)
    if remainder or not all(map(torch.equal, actual, expected)):
        return None
    return _Expansion(weight, heads, nope_size, value_size, scheme)


def mark_expand_kv(model: nn.Module) -> AbstractContextManager[None]:
    """Replaces ``expand_kv`` by the marker op in all modules whose method is equivalent to it."""
    return replaced(model, "expand_kv", lambda m: _expansion(m) if is_latent_attention(m) else None)
