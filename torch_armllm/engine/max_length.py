"""How long a model's texts may be."""

from __future__ import annotations

from typing import Any

from torch_armllm.hf.base_model import base_model_of, position_limit
from torch_armllm.plan.plan_model import StoredModel

UNLIMITED = 32768
"""Tokens of texts of models that state no limit."""


def stated_limits(model: Any) -> tuple[int | None, int]:
    """Positions that a model was made for, None where any number will do; and those that it states."""
    if isinstance(model, StoredModel):
        return model.made_for, model.stated
    stated = getattr(model.config.get_text_config(), "max_position_embeddings", None) or UNLIMITED
    return position_limit(base_model_of(model).config), stated


def longest_text(model: Any, wanted: int | None, longest: int | None) -> int:
    """Most tokens of a prompt and its sequence.

    Args:
        model: a causal language model.
        wanted: what the user asks for, or None.
        longest: most that the model's plan can attend to, or None.

    Raises:
        ValueError: more is asked for than the model was made for.
    """
    made_for, stated = stated_limits(model)
    most = min(made_for or stated, longest or stated)
    if wanted is None:
        return most
    if wanted < 2:
        raise ValueError(
            f"max_model_len = {wanted} leaves no room for a prompt and an answer: give at least 2"
        )
    if made_for is not None and wanted > made_for:
        raise ValueError(
            f"max_model_len = {wanted}, but this model was made for texts of {made_for} tokens: ask for "
            "less, or load it with rope scaling"
        )
    if longest is not None and wanted > longest:
        raise ValueError(
            f"max_model_len = {wanted}, but this model attends to {longest} tokens as a whole at most, and "
            f"the engine does nothing else: ask for {longest} at most"
        )
    return wanted
