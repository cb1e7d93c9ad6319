"""Names of the cache in transformers' models: as an argument, and as a field of their outputs."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""Names of the cache, that of the newest releases first.

Releases before 5.24 say ``past_key_values``, and ``cache_params`` in models without attention; later ones say
``cache``, and take the others as aliases.
"""
STATE_NAMES = (*CACHE_NAMES, "state", "mems")
"""The same, and names of what a few families carry from one call to the next in its place."""


def cache_argument(forward: Callable[..., Any]) -> str:
    """Returns the name of a forward's argument for the cache; the usual one if its signature has none."""
    names = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in names), usual_name())


def cache_field(output: type) -> str | None:
    """Returns the name of the field for the cache in a class of outputs; None if it has none.

    Properties do not count: a release may have some with the names before, which read and write the field.
    """
    names = {field.name for field in dataclasses.fields(output)} if dataclasses.is_dataclass(output) else ()
    return next((name for name in CACHE_NAMES if name in names), None)


def cache_of(output: Any) -> Any:
    """Returns the cache in a model's output; None if it has none."""
    name = cache_field(type(output))
    return None if name is None else getattr(output, name)


@functools.cache
def usual_name() -> str:
    """Returns the name that most models of the installed release use."""
    from transformers.modeling_outputs import BaseModelOutputWithPast  # deferred: the import takes seconds

    name = cache_field(BaseModelOutputWithPast)
    assert name is not None
    return name


@functools.cache
def taken_names() -> tuple[str, ...]:
    """Returns the names of the cache in calls of the installed release: the usual one, and older ones.

    A newer name may mean something else: 5.23 hands ``cache`` on to the attention of ``generate_batch``.
    """
    return CACHE_NAMES[CACHE_NAMES.index(usual_name()) :]


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """Returns the cache in a call's arguments, by any of `taken_names`; None if it is not given."""
    return next((arguments[name] for name in taken_names() if arguments.get(name) is not None), None)


def take_cache(arguments: dict[str, Any]) -> Any:
    """Removes the cache from a call's arguments, by all its names, and returns it; see `given_cache`."""
    cache = given_cache(arguments)
    for name in taken_names():
        arguments.pop(name, None)
    return cache
