"""Maximum length of the sequences that an engine accepts."""

from __future__ import annotations


def resolve_max_model_len(
    requested: int | None, position_limit: int | None, stated_positions: int, max_length: int | None
) -> int:
    """Returns the maximum number of tokens of a prompt and its output together.

    Args:
        requested: the user's ``max_model_len``, or None.
        position_limit: see `torch_armllm.plan.servable_model.ServableModel`.
        stated_positions: see there.
        max_length: see there.

    Raises:
        ValueError: ``requested`` is too small, or more than the model allows.
    """
    if requested is None:
        return min(position_limit or stated_positions, max_length or stated_positions)
    if requested < 2:
        raise ValueError(
            f"max_model_len = {requested} leaves no room for a prompt and an output token: request at least 2"
        )
    if position_limit is not None and requested > position_limit:
        raise ValueError(
            f"max_model_len = {requested}, but this model supports sequences of at most {position_limit} "
            "tokens: request fewer, or load it with rope scaling"
        )
    if max_length is not None and requested > max_length:
        raise ValueError(
            f"max_model_len = {requested}, but the plan of this model supports sequences of at most "
            f"{max_length} tokens: request at most {max_length}"
        )
    return requested
