"""Attention of GGUF files: sizes of heads, windows and scales, as transformers' configuration."""

from __future__ import annotations

import math
from typing import Any

from torch_armllm.checkpoint.formats.gguf_header import Header, settable

_BY_HIDDEN_SIZE = {"gemma2": 46, "gemma3_text": 62}
"""Blocks of the Gemma of 27 billion weights, whose scale llama.cpp takes from the hidden size."""


def apply_attention(config: Any, header: Header) -> None:
    """Sets heads, windows and scales of a configuration by the header.

    Raises:
        ValueError: transformers' model has no such attention.
    """
    _layer_types(config, header)
    _heads(config, header)
    _head_sizes(config, header)
    _window(config, header)
    _scale(config, header)
    _alibi(config, header)


def _layer_types(config: Any, header: Header) -> None:
    """Sets which layers have a window, by a list or by the number of layers from one without to the next."""
    pattern = header.value("attention.sliding_window_pattern")
    if pattern is None:
        return
    count = config.num_hidden_layers
    windowed: list[bool]
    if isinstance(pattern, list):
        windowed = [bool(one) for one in pattern[:count]]
    elif isinstance(pattern, bool):
        windowed = [pattern] * count
    else:
        windowed = [bool(pattern) and layer % int(pattern) < int(pattern) - 1 for layer in range(count)]
    types = getattr(config, "layer_types", None)
    if types is None:
        if any(windowed) and not (all(windowed) and hasattr(config, "sliding_window")):
            raise header.unsupported("attention.sliding_window_pattern", pattern, config.model_type)
        return
    if len(windowed) != count:
        raise header.wrong("attention.sliding_window_pattern", pattern, f"a value for each of {count} blocks")
    config.layer_types = ["sliding_attention" if one else "full_attention" for one in windowed]
    if any(windowed) and hasattr(config, "use_sliding_window"):
        config.use_sliding_window = True


def _heads(config: Any, header: Header) -> None:
    """Sets the number of key and value heads: one, or one for each kind of layer."""
    count = header.value("attention.head_count_kv")
    if count is None:
        return
    if not isinstance(count, list):
        whole = header.integer("attention.head_count_kv")
        names = [name for name in ("num_key_value_heads", "num_kv_heads") if settable(config, name)]
        for name in names:
            setattr(config, name, whole)
        if not names and whole and whole != getattr(config, "num_attention_heads", 0):
            raise header.unsupported("attention.head_count_kv", whole, config.model_type)
        return
    types = getattr(config, "layer_types", None) or []
    found: dict[str, set[int]] = {}
    for kind, heads in zip(types, count, strict=False):
        found.setdefault(kind, set()).add(int(heads))
    if len(types) != config.num_hidden_layers or any(len(one) > 1 for one in found.values()):
        raise header.unsupported("attention.head_count_kv", count, config.model_type)
    by_kind = {kind: one.pop() for kind, one in found.items() if one != {0}}
    full, sliding = by_kind.get("full_attention"), by_kind.get("sliding_attention")
    if full is not None and sliding not in (None, full):
        if not hasattr(config, "num_global_key_value_heads"):
            raise header.unsupported("attention.head_count_kv", count, config.model_type)
        config.num_key_value_heads, config.num_global_key_value_heads = sliding, full
    elif by_kind:
        config.num_key_value_heads = full if full is not None else sliding


def _head_sizes(config: Any, header: Header) -> None:
    key, value = header.integer("attention.key_length"), header.integer("attention.value_length")
    local, local_value = (header.integer(f"attention.{name}_length_swa") for name in ("key", "value"))
    for name in ("key_length_mla", "value_length_mla"):
        if header.integer(f"attention.{name}"):
            raise header.unsupported(
                f"attention.{name}", header.integer(f"attention.{name}"), config.model_type
            )
    if hasattr(config, "global_head_dim"):
        _set(config, "global_head_dim", key)
        _set(config, "head_dim", local)
    elif local not in (None, 0, key):
        raise header.unsupported("attention.key_length_swa", local, config.model_type)
    elif key is not None and settable(config, "head_dim"):
        config.head_dim = key
    elif key is not None and key * config.num_attention_heads != config.hidden_size:
        raise header.unsupported("attention.key_length", key, config.model_type)
    for one, name, other in ((value, "value_length", key), (local_value, "value_length_swa", local)):
        own = other if other is not None else _head_size(config)
        if one is not None and one != own:
            raise header.unsupported(f"attention.{name}", one, config.model_type)


def _set(config: Any, name: str, value: Any) -> None:
    if value is not None:
        setattr(config, name, value)


def _head_size(config: Any) -> int:
    size = getattr(config, "global_head_dim", None) or getattr(config, "head_dim", None)
    return int(size or config.hidden_size // max(1, getattr(config, "num_attention_heads", 1)))


def _window(config: Any, header: Header) -> None:
    window = header.integer("attention.sliding_window")
    if not window:
        if config.model_type in ("mistral", "mixtral"):
            config.sliding_window = None  # llama.cpp reads them as a Llama, which has no window
        return
    if window >= config.max_position_embeddings and not hasattr(config, "sliding_window"):
        return  # no text is longer
    if not hasattr(config, "sliding_window"):
        raise header.unsupported("attention.sliding_window", window, config.model_type)
    used = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    if not used and window < config.max_position_embeddings:
        raise header.unsupported("attention.sliding_window", window, config.model_type)
    config.sliding_window = window


def _scale(config: Any, header: Header) -> None:
    scale = header.number("attention.scale")
    if hasattr(config, "query_pre_attn_scalar"):
        blocks = _BY_HIDDEN_SIZE.get(config.model_type)
        by_hidden = config.num_hidden_layers == blocks
        own = config.hidden_size / config.num_attention_heads if by_hidden else config.head_dim
        config.query_pre_attn_scalar = 1 / (scale * scale) if scale else own
    elif scale and hasattr(config, "attention_multiplier"):
        config.attention_multiplier = scale
    elif scale and not math.isclose(scale, _head_size(config) ** -0.5, rel_tol=1e-5):
        raise header.unsupported("attention.scale", scale, config.model_type)


def _alibi(config: Any, header: Header) -> None:
    bias = header.number("attention.max_alibi_bias")
    if bias and not (config.model_type == "bloom" and bias == 8.0):
        raise header.unsupported("attention.max_alibi_bias", bias, config.model_type)
