"""The base model of a causal language model, which a plan replaces, and its position limits."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from torch_armllm.hf.output_layer import model_parts, output_layer_of


def base_model_of(model: Any) -> Any:
    """Returns the submodule from token ids to hidden states; the model itself if it has none.

    It is ``base_model``, except for models whose prefix names a missing attribute (Llama 4: the one of its
    language model, which has a head of its own; Kosmos-2.5: the one that gets the token ids), and for those
    whose base model holds a single other one: heads call that one past it (OPT, Whisper).
    """
    base = getattr(model, "base_model", model)
    if base is model:
        parts = model_parts(model)
        if len(parts) == 1:
            return parts[0]
        inner = getattr(model, "language_model", model)
        return _reached_by_ids(model) if inner is model else base_model_of(inner)
    while len(list(base.children())) == 1 and (parts := model_parts(base)):
        (base,) = parts
    return base


def _reached_by_ids(model: Any) -> Any:
    """Returns the outermost module within a model that it hands token ids, for their hidden states.

    It is the model itself if that has no head, or if it needs more than token ids.
    """
    if output_layer_of(model) is None:
        return model
    reached: list[Any] = []

    def record(module: Any, arguments: Any, named: dict[str, Any], output: Any) -> None:
        is_given = any(value is ids for value in (*arguments, *named.values()))
        if is_given and module is not model and hasattr(output, "last_hidden_state"):
            reached.append(module)

    ids = torch.zeros(1, 1, dtype=torch.int64)
    hooks = [each.register_forward_hook(record, with_kwargs=True) for each in model.modules()]
    try:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
    except Exception:  # noqa: BLE001 - it may need an image
        return model
    finally:
        for hook in hooks:
            hook.remove()
    return reached[-1] if reached else model


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
    table = _position_table(base)
    return 0 if table is None or table.padding_idx is None else int(table.padding_idx) + 1


def default_positions(base: Any, input_ids: Any) -> Any:
    """Returns the positions of tokens ``(batch, T)`` by a RoBERTa-like model: padding tokens do not count."""
    table = _position_table(base)
    counter = _position_counter(table)
    assert counter is not None
    return counter(input_ids, table.padding_idx)


def _position_table(base: Any) -> Any:
    """Returns the module that numbers tokens from ``padding_idx + 1``; None if there is none.

    It is the embeddings, or, in models that take positions, a part that looks them up.
    """
    parts = [getattr(base, "embeddings", None)]
    if hasattr(base, "children") and "position_ids" in inspect.signature(base.forward).parameters:
        parts += [part for part in base.children() if hasattr(part, _COUNTER)]
    return next((p for p in parts if hasattr(p, "padding_idx") and _position_counter(p) is not None), None)


_COUNTER = "create_position_ids_from_input_ids"


def _position_counter(table: Any) -> Callable[..., Any] | None:
    """Returns a function of token ids and that of padding: a method of the embeddings, or one beside them."""
    file = sys.modules.get(type(table).__module__)
    counter = getattr(table, _COUNTER, None) or getattr(file, _COUNTER, None)
    return counter if callable(counter) else None


def position_limit(config: Any) -> int | None:
    """Returns the most positions of a model; None if its rotary embedding scales with the sequence length."""
    text = config.get_text_config()
    ropes = getattr(text, "rope_parameters", None) or {}
    kinds = {r.get("rope_type") for r in (ropes, *ropes.values()) if isinstance(r, dict)}
    limit = getattr(text, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and "dynamic" not in kinds else None
