"""Computation of a module's calls by its own ``forward``, where a plan cannot serve them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

from torch import nn

from torch_armllm.patching.watched_modules import WatchedModules


class Unserved(Exception):
    """The plan cannot serve this call; the message states the reason."""


class _Calls(local):
    """Wishes of a thread for its own calls."""

    modules_only: str | None = None
    """The reason why calls run module by module."""


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
        self._calls = _Calls()
        self._watched: WatchedModules | None = None

    @contextmanager
    def by_modules(self, reason: str) -> Iterator[None]:
        """Runs every call of this thread module by module while the context lasts."""
        before, self._calls.modules_only = self._calls.modules_only, reason
        try:
            yield
        finally:
            self._calls.modules_only = before

    @property
    def is_by_modules(self) -> bool:
        """True while `by_modules` lasts."""
        return self._calls.modules_only is not None

    def raise_if_by_modules(self) -> None:
        """Raises `Unserved` while `by_modules` lasts."""
        if self._calls.modules_only is not None:
            raise Unserved(self._calls.modules_only)

    def watch(self) -> None:
        """Lets calls run module by module as soon as the modules differ from what they are now."""
        self._watched = WatchedModules(self.base)

    def raise_if_changed(self, reads_weights: bool) -> None:
        """Raises `Unserved` if the modules have changed since `watch`.

        Args:
            reads_weights: look for weights that were written in place too, which takes longer.
        """
        change = None if self._watched is None else self._watched.change(reads_weights)
        if change is not None:
            raise Unserved(f"{change} after patch (unpatch and patch the model to get a plan of it)")

    def _warn(self, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(
                f"torch_armllm: {reason}; such calls run module by module, which is slower", stacklevel=4
            )
