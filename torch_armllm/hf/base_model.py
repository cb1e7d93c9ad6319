"""The base model of a causal language model, which a plan replaces, and its position limits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def base_model_of(model: Any) -> Any:
    """Returns the submodule from token ids to hidden states; the model itself if it has none.

    It is ``base_model``, except for models whose prefix names a missing attribute (Llama 4: the one of its
    language model, which has a head of its own), and for those whose base model holds a single other one:
    heads call that one past it (OPT, Whisper).
    """
    base = getattr(model, "base_model", model)
    if base is model:
        parts = _model_parts(model)
        if len(parts) == 1:
            return parts[0]
        inner = getattr(model, "language_model", model)
        return model if inner is model else base_model_of(inner)
    while len(list(base.children())) == 1 and (parts := _model_parts(base)):
        (base,) = parts
    return base


def _model_parts(model: Any) -> list[Any]:
    """Returns the children that are models themselves."""
    from transformers import (
        PreTrainedModel,  # deferred: the import takes seconds, and most models do not need it
    )

    return [child for child in model.children() if isinstance(child, PreTrainedModel)]


def max_length_of(base: Any) -> int | None:
    """Returns the chunk size of a model with chunked attention, else None.

    Paged attention does not support several chunks, so the chunk size is the maximum length.
    """
    config = base.config.get_text_config()
    chunk = getattr(config, "attention_chunk_size", None)
    kinds = getattr(config, "layer_types", None) or ["chunked_attention"]
    return int(chunk) if chunk and "chunked_attention" in kinds else None


def first_position_of(base: Any) -> int:
    """Returns the default position of the first token: RoBERTa-like models count from ``padding_idx + 1``."""
    table: Any = getattr(base, "embeddings", None)
    counts = _position_counter(table) is not None
    return int(table.padding_idx) + 1 if counts and getattr(table, "padding_idx", None) is not None else 0


def default_positions(base: Any, input_ids: Any) -> Any:
    """Returns the positions of tokens ``(batch, T)`` by a RoBERTa-like model: padding tokens do not count."""
    table = base.embeddings
    counter = _position_counter(table)
    assert counter is not None
    return counter(input_ids, table.padding_idx)


def _position_counter(table: Any) -> Callable[..., Any] | None:
    """Returns a function of token ids and that of padding: a method of the embeddings, or one beside them."""
    name = "create_position_ids_from_input_ids"
    file = sys.modules.get(type(table).__module__)
    counter = getattr(table, name, None) or getattr(file, name, None)
    return counter if callable(counter) else None


def position_limit(config: Any) -> int | None:
    """Returns the most positions of a model; None if its rotary embedding scales with the sequence length."""
    text = config.get_text_config()
    ropes = getattr(text, "rope_parameters", None) or {}
    kinds = {r.get("rope_type") for r in (ropes, *ropes.values()) if isinstance(r, dict)}
    limit = getattr(text, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and "dynamic" not in kinds else None
