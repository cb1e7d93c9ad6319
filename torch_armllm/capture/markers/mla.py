"""The seam of latent attention: while a model is captured, `expand_kv` leaves its latents in the graph.

All families of multi-head latent attention in transformers expand their latents in a method of that name,
right in front of their attention: ``kv_b_proj`` gives each head's key without position and its value, and the
rotated key that all heads share is put behind the former.  What a module's own method gives is compared with
this before it is replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.quant.packing import dequantize_matrix

_library = torch.library.Library("armllm", "FRAGMENT")
_library.define(
    "expand_kv(Tensor latent, Tensor k_rope, Tensor weight, int heads, int nope_size, int value_size,"
    " str scheme) -> (Tensor, Tensor)"
)


def float_weight(weight: Tensor, rank: int, rows: int, scheme: str) -> Tensor:
    """The up-projection ``(rows, rank)`` in floats, as it is or from packed panels."""
    return dequantize_matrix(weight, rows, rank, scheme) if scheme else weight


def expand_kv(
    latent: Tensor, k_rope: Tensor, weight: Tensor, heads: int, nope_size: int, value_size: int, scheme: str
) -> tuple[Tensor, Tensor]:
    """Keys and values of all heads from the latents, as slow and plain as can be.

    Args:
        latent: ``(1, 1, T, rank)``.
        k_rope: ``(1, 1, T, rope_size)``.
        weight: ``(heads · (nope_size + value_size), rank)``, or packed.
        heads: number of heads.
        nope_size: elements of a key that carry no position.
        value_size: elements of a value.
        scheme: of a packed weight; empty where it is floats.

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


def _fake(
    latent: Tensor, k_rope: Tensor, weight: Tensor, heads: int, nope_size: int, value_size: int, scheme: str
) -> tuple[Tensor, Tensor]:
    sizes = (latent.shape[0], heads, latent.shape[2])
    return (
        latent.new_empty((*sizes, nope_size + k_rope.shape[-1])),
        latent.new_empty((*sizes, value_size)),
    )


_library.impl("expand_kv", expand_kv, "CompositeExplicitAutograd")
torch.library.register_fake("armllm::expand_kv", _fake, lib=_library)


@dataclass(frozen=True)
class _Expansion:
    """What stands in for a module's ``expand_kv``."""

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


def expands_latents(module: nn.Module) -> bool:
    """Whether a module is latent attention."""
    return callable(getattr(module, "expand_kv", None)) and isinstance(
        getattr(module, "kv_b_proj", None), nn.Module
    )


def _expansion(module: Any) -> _Expansion | None:
    """What the module's method computes, or None where it is not the one that is known."""
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
    heads, rest = divmod(int(linear.out_features), nope_size + value_size)
    random = torch.Generator().manual_seed(0)
    latent, k_rot = (
        torch.randn(1, 1, 2, size, generator=random).to(dtype)
        for size in (int(linear.in_features), int(module.qk_rope_head_dim))
    )
    found = module.expand_kv(latent, k_rot)
    expected = _join(linear(latent), k_rot, heads, nope_size)
    if rest or not all(map(torch.equal, found, expected)):
        return None
    return _Expansion(weight, heads, nope_size, value_size, scheme)


@contextlib.contextmanager
def latents_left_in_graph(model: nn.Module) -> Iterator[None]:
    """Replaces ``expand_kv`` by the marker op in all modules where it computes what is known."""
    replaced: list[nn.Module] = []
    try:
        for module in model.modules():
            if expands_latents(module):
                stand_in: Callable[..., Any] | None = _expansion(module)
                if stand_in is not None:
                    module.__dict__["expand_kv"] = stand_in
                    replaced.append(module)
        yield
    finally:
        for module in replaced:
            del module.__dict__["expand_kv"]
