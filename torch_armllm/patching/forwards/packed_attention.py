"""Attention of modules that pack texts and divide them themselves, as capture reads it: to one whole text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_PARTS = ("qkv", "proj", "num_heads", "scaling", "config")


def is_packed_attention(module: nn.Module) -> bool:
    """True if a module has the parts of an attention that `whole_texts_in` knows."""
    return all(hasattr(module, part) for part in _PARTS)


@contextmanager
def whole_texts_in(attentions: Sequence[Any]) -> Iterator[None]:
    """Lets attentions take hidden states ``(batch, T, hidden)`` of whole texts while the context lasts.

    Their own ``forward`` asks for the lengths of packed texts as numbers, which a graph does not have.
    """
    try:
        for attention in attentions:
            attention.__dict__["forward"] = partial(_attend, attention)
        yield
    finally:
        for attention in attentions:
            attention.__dict__.pop("forward", None)


def _attend(
    attention: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
) -> Tensor:
    batch, tokens, _width = hidden_states.shape
    cos, sin = (angles.unsqueeze(1) for angles in position_embeddings)
    heads = (batch, tokens, attention.num_heads, -1)
    q, k, v = (part.view(heads).transpose(1, 2) for part in attention.qkv(hidden_states).chunk(3, -1))
    q, k = (x * cos + _rotated_by_half(x) * sin for x in (q, k))
    name = attention.config._attn_implementation
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, sdpa_attention_forward)
    out, _ = attend(attention, q, k, v, None, scaling=attention.scaling)
    result: Tensor = attention.proj(out.reshape(batch, tokens, -1))
    return result


def _rotated_by_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)
