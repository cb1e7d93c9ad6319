"""Prompts of offline calls: one or several, and errors that name one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch_armllm.engine.preprocess import Prompt

Prompts = Prompt | Sequence[Prompt]
"""One prompt or several; a list of integers is one prompt."""


def as_prompt_list(prompts: Prompts) -> list[Prompt]:
    """Returns one or several prompts as a list."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    several = list(prompts)
    if several and all(isinstance(token, int) for token in several):
        return [several]  # type: ignore[list-item]
    return several  # type: ignore[return-value]


@contextmanager
def named_errors(noun: str, index: int, count: int) -> Iterator[None]:
    """Adds the index of an input to errors, if there are several."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ValueError(f"{noun} {index}: {error}" if count > 1 else str(error)) from error
