"""Outputs of transformers' models, of the class that a model's own forward returns."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any, get_args

import torch
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.utils import ModelOutput

from torch_armllm.hf.cache_names import cache_field


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
    given = {"input_ids": torch.zeros(1, 1, dtype=torch.int64), "use_cache": False, "return_dict": True}
    names = inspect.signature(module.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values())
    try:
        found = type(module(**{name: value for name, value in given.items() if takes_any or name in names}))
    except Exception:  # noqa: BLE001 - a decoder may need the states of an encoder
        found = None
    declared = getattr(inspect.unwrap(module.forward), "__annotations__", {}).get("return")
    kinds = (kind for kind in (found, *_classes_in(declared)) if _is_output(kind))
    kind: type[Any] = next(kinds, BaseModelOutputWithPastAndCrossAttentions)
    return kind


def _classes_in(annotation: Any) -> Iterator[Any]:
    """Yields the members of a union of types, or the type itself."""
    yield annotation
    for member in get_args(annotation):
        yield from _classes_in(member)


def _is_output(kind: Any) -> bool:
    is_class = isinstance(kind, type) and issubclass(kind, ModelOutput)
    return is_class and "last_hidden_state" in {field.name for field in dataclasses.fields(kind)}
