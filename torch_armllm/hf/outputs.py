"""Outputs of transformers' models, of the class that a model's own forward returns."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import torch
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.utils import ModelOutput

from torch_armllm.hf.cache_names import cache_field

_TOKENS = (0, 1, 2)
"""Ids of tokens, of which one at least stands for no image or sound."""


class OutputForm:
    """The class that a module's own forward returns: heads find each of its fields, None where none is given.

    Args:
        module: a base model, an encoder or a decoder, with its own forward.
    """

    def __init__(self, module: Any) -> None:
        self.kind = _class_of(module)
        self._cache = cache_field(self.kind)
        self._names = {field.name for field in dataclasses.fields(self.kind)}

    def make(self, hidden: torch.Tensor, cache: Any = None, **others: Any) -> Any:
        """Returns an output.

        Args:
            hidden: the last hidden states.
            cache: the cache; None: it is not returned.
            others: further fields; those that the class lacks are left out.
        """
        values = {name: value for name, value in others.items() if name in self._names}
        if self._cache is not None:
            values[self._cache] = cache
        return self.kind(last_hidden_state=hidden, **values)


@torch.no_grad()
def _class_of(module: Any) -> type[Any]:
    """Returns the class of a module's result for one token, or else the one that its forward declares.

    Declarations of a few families name another class, one with fewer fields.
    """
    names = inspect.signature(module.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values())
    given = {"use_cache": False, "return_dict": True}
    arguments = {name: value for name, value in given.items() if takes_any or name in names}
    found = None
    for token in _TOKENS:
        try:
            found = type(module(input_ids=torch.full((1, 1), token), **arguments))
        except Exception:  # noqa: BLE001 - a decoder may need an encoder's states, a placeholder its image
            continue
        break
    kinds = (kind for kind in (found, *_classes_in(_declared(module.forward))) if _is_output(kind))
    kind: type[Any] = next(kinds, BaseModelOutputWithPastAndCrossAttentions)
    return kind


def _declared(forward: Any) -> Any:
    """Returns what a forward's annotation says that it returns; None if it says nothing."""
    own = inspect.unwrap(forward)
    try:
        return get_type_hints(own).get("return")
    except Exception:  # noqa: BLE001 - a name in an annotation may be imported for type checks only
        return getattr(own, "__annotations__", {}).get("return")


def _classes_in(annotation: Any) -> Iterator[Any]:
    """Yields the members of a union of types, or the type itself."""
    yield annotation
    for member in get_args(annotation):
        yield from _classes_in(member)


def _is_output(kind: Any) -> bool:
    is_class = isinstance(kind, type) and issubclass(kind, ModelOutput)
    return is_class and "last_hidden_state" in {field.name for field in dataclasses.fields(kind)}
