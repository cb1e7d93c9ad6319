"""The layer from hidden states to logits, also of wrappers that do not name it."""

from __future__ import annotations

from typing import Any


def output_layer_of(model: Any) -> Any:
    """Returns the layer from hidden states to logits; None if there is none, or several.

    Wrappers of a causal language model and towers may not say that it is the language model's.
    """
    get = getattr(model, "get_output_embeddings", None)
    layer = None if get is None else get()
    if layer is not None or not hasattr(model, "children"):
        return layer
    layers = [each for each in map(output_layer_of, model_parts(model)) if each is not None]
    return layers[0] if len(layers) == 1 else None


def model_parts(model: Any) -> list[Any]:
    """Returns the children that are models themselves."""
    from transformers import (
        PreTrainedModel,  # deferred: the import takes seconds, and most models do not need it
    )

    return [child for child in model.children() if isinstance(child, PreTrainedModel)]
