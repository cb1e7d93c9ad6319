"""Texts of models that give their language model embeddings in place of token ids (Llama 4)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from torch_armllm.capture.sample import sample_ids

_TOKENS = 4
_OTHERS = ("pixel_values", "inputs_embeds", "mm_encoder_outputs", "labels")
"""Arguments of calls that are left to the model; embeddings of a text are those of its ids."""


@torch.no_grad()
def has_nested_text(model: Any) -> bool:
    """True if a model of texts and pictures holds a language model with the same logits of texts."""
    inner = getattr(model, "language_model", None)
    if inner is None or inner.get_output_embeddings() is None:
        return False
    ids = sample_ids(model.get_input_embeddings().num_embeddings, _TOKENS)
    return torch.equal(model(input_ids=ids).logits, inner(input_ids=ids).logits)


def with_texts_by_ids(model: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the model's ``forward`` so that its language model gets the token ids of texts.

    Args:
        model: see `has_nested_text`.
        own: its ``forward``.
    """
    signature = inspect.signature(own)
    taken = inspect.signature(model.language_model.forward).parameters.keys()

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        named = {**dict(zip(signature.parameters, args, strict=False)), **kwargs}
        given = {name for name, value in named.items() if not _is_nothing(value)}
        if "input_ids" not in given or not given.isdisjoint(_OTHERS):
            return own(*args, **kwargs)
        return model.language_model(**{n: v for n, v in named.items() if n in taken or n in given})

    return forward


def _is_nothing(value: Any) -> bool:
    """True for what `generate` passes if there are no pictures: None, False and empty encodings."""
    return value is None or value is False or (isinstance(value, dict) and not value)
