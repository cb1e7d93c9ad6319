"""Prompts of offline calls: one or several, what belongs to each, and errors that name one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch_armllm.engine.text.preprocess import Prompt
from torch_armllm.lora.request import LoRARequest

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


def adapters_of(
    given: LoRARequest | Sequence[LoRARequest | None] | None, count: int
) -> list[LoRARequest | None]:
    """Returns the adapter of each prompt."""
    if given is None or isinstance(given, LoRARequest):
        return [given] * count
    return one_each("lora_request", given, count, None)


def priorities_of(given: Sequence[int] | int | None, count: int) -> list[int]:
    """Returns the priority of each prompt."""
    return [given] * count if isinstance(given, int) else one_each("priority", given, count, 0)


def one_each(name: str, values: Sequence[Any] | None, count: int, default: Any) -> list[Any]:
    """Returns a list of an argument's values, one for each prompt.

    Raises:
        ValueError: there are more or fewer.
    """
    if values is None:
        return [default] * count
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries for {count} prompts; give one per prompt")
    return list(values)
