"""Sizes of attention by a model's configuration, whose layers may differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AttentionSizes:
    """Upper bounds of what a model's attention has.

    Attributes:
        layers: number of layers.
        kv_heads: heads of keys and values in a layer.
        head_size: elements of a head's key, and of its value.
    """

    layers: int
    kv_heads: int
    head_size: int


def attention_sizes(config: Any) -> AttentionSizes | None:
    """Returns the sizes of a model's attention.

    None if the configuration lacks layers, attention heads or a hidden size, as Mamba's does.
    """
    text = config.get_text_config()
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size", "head_dim", "num_key_value_heads")
    layers, heads, hidden, size, kv_heads = (_largest(text, name) for name in names)
    if not (layers and heads and hidden):
        return None
    return AttentionSizes(layers, kv_heads or heads, size or hidden // heads)


def _largest(config: Any, name: str) -> int:
    """Returns a size of a configuration, the largest of its layers'; 0 if it has none.

    Releases from 5.24 on raise an error where a size that layers have each for itself is read from the whole.
    """
    by_layer = name in (getattr(config, "per_layer_attributes", None) or ())
    values = (getattr(part, name, None) for part in (config.per_layer_config if by_layer else (config,)))
    return max((value for value in values if isinstance(value, int)), default=0)
