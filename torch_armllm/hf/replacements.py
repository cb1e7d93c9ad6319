"""Attributes in the place of those of a model and its modules, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn


class Replacements:
    """Attributes of modules that were replaced, in order.

    As a context, it takes everything back if anything raises in it, an interruption included.
    """

    def __init__(self) -> None:
        self._before: list[tuple[nn.Module, str, bool, Any]] = []

    def __enter__(self) -> Replacements:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.undo()

    def put(self, module: nn.Module, name: str, value: Any) -> None:
        """Sets an attribute of a module itself, in front of that of its class."""
        own = module.__dict__
        self._before.append((module, name, name in own, own.get(name)))  # first: setting may be interrupted
        own[name] = value

    def modules(self) -> list[nn.Module]:
        """Returns the modules that have replaced attributes."""
        return list({id(module): module for module, *_ in self._before}.values())

    def attributes_before(self, module: nn.Module) -> dict[str, Any]:
        """Returns the attributes of a module, with those that it had in the place of the replaced ones."""
        attributes = dict(module.__dict__)
        for other, name, had, before in reversed(self._before):
            if other is module and had:
                attributes[name] = before
            elif other is module:
                attributes.pop(name, None)
        return attributes

    def undo(self) -> None:
        """Gives all modules back what they had."""
        while self._before:
            module, name, had, before = self._before[-1]
            if had:
                module.__dict__[name] = before
            else:
                module.__dict__.pop(name, None)
            self._before.pop()  # last: it may be interrupted, and begun anew


@contextmanager
def replaced(model: nn.Module, name: str, replacement_of: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces an attribute of a model's modules while the context lasts.

    Args:
        model: whose modules are looked at in order, with those before already replaced.
        name: of the attribute.
        replacement_of: returns what a module gets; None leaves it as it is.
    """
    replacements = Replacements()
    try:
        for module in model.modules():
            with torch.no_grad():
                replacement = replacement_of(module)
            if replacement is not None:
                replacements.put(module, name, replacement)
        yield
    finally:
        replacements.undo()
