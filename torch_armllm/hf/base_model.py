"""The part of a causal language model that a plan replaces."""

from __future__ import annotations

from typing import Any


def body_of(model: Any) -> Any:
    """What turns token ids into hidden states; the model itself where it has no such part.

    It is ``base_model``, but for models whose prefix names an attribute that they lack (Llama 4's).
    """
    base = getattr(model, "base_model", model)
    if base is not model:
        return base
    from transformers import PreTrainedModel  # seconds, which most models go without

    parts = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    return parts[0] if len(parts) == 1 else model


def longest_of(base: Any) -> int | None:
    """Positions after which attention starts anew, in chunks, which paged attention does not do; or None."""
    config = base.config.get_text_config()
    chunk = getattr(config, "attention_chunk_size", None)
    kinds = getattr(config, "layer_types", None) or ["chunked_attention"]
    return int(chunk) if chunk and "chunked_attention" in kinds else None


def first_position_of(base: Any) -> int:
    """Position of a text's first token where none is given: RoBERTa and its kin count from behind padding."""
    table: Any = getattr(base, "embeddings", None)
    counts = callable(getattr(table, "create_position_ids_from_input_ids", None))
    return int(table.padding_idx) + 1 if counts and getattr(table, "padding_idx", None) is not None else 0


def position_limit(config: Any) -> int | None:
    """Positions that a model was made for; None where its rotary embedding grows with the text."""
    text = config.get_text_config()
    ropes = getattr(text, "rope_parameters", None) or {}
    kinds = {r.get("rope_type") for r in (ropes, *ropes.values()) if isinstance(r, dict)}
    limit = getattr(text, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and "dynamic" not in kinds else None
