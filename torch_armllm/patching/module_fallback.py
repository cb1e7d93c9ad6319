"""Computation of a module's calls by its own ``forward``, where a plan cannot serve them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class Unserved(Exception):
    """The plan cannot serve this call; the message states the reason."""


class ModuleFallback:
    """A ``forward`` of a module that keeps the module's own.

    Args:
        base: the module.
    """

    def __init__(self, base: nn.Module) -> None:
        self.base = base
        self.module_forward: Callable[..., Any] = base.forward
        self.__signature__ = inspect.signature(base.forward)  # what pipelines and trainers ask for names
        self._warned: set[str] = set()
        self._modules_only: str | None = None

    @contextmanager
    def by_modules(self, reason: str) -> Iterator[None]:
        """Runs every call module by module while the context lasts."""
        self._modules_only = reason
        try:
            yield
        finally:
            self._modules_only = None

    @property
    def is_by_modules(self) -> bool:
        """True while `by_modules` lasts."""
        return self._modules_only is not None

    def raise_if_by_modules(self) -> None:
        """Raises `Unserved` while `by_modules` lasts."""
        if self._modules_only is not None:
            raise Unserved(self._modules_only)

    def _warn(self, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(
                f"torch_armllm: {reason}; such calls run module by module, which is slower", stacklevel=4
            )
