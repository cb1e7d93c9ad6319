"""Refusal of models that do not generate one token after another from their own tokens alone."""

from __future__ import annotations

import inspect
from typing import Any

_OF_ANOTHER_MODEL = "shared_kv_states"
"""Argument for keys and values that another model has computed."""


def check_token_by_token(name: str, kind: type[Any]) -> None:
    """Raises ValueError for a class that generates in another way than token by token.

    Args:
        name: of the model, for the message.
        kind: its class.
    """
    from transformers import GenerationMixin  # deferred: the import takes seconds

    can_generate = getattr(kind, "can_generate", None)
    if can_generate is None or not can_generate():
        return
    if not issubclass(kind, GenerationMixin):
        raise ValueError(
            f"{name} ({kind.__name__}) does not generate token by token: it refines whole blocks of tokens, "
            "as diffusion models of text do, and neither patch nor an engine computes such steps; run it by "
            "transformers alone"
        )
    if _OF_ANOTHER_MODEL in inspect.signature(kind.forward).parameters:
        raise ValueError(
            f"{name} ({kind.__name__}) drafts for another model, whose keys and values it attends to, and "
            "generates no text of its own; hand it to transformers' generate as assistant_model"
        )
