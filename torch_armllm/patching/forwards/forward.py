"""``forward`` of a patched module."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from threading import RLock, local
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from torch_armllm.hf.cache_names import take_cache
from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.patching.forwards.calls import CallArguments, Calls, TokenCalls
from torch_armllm.patching.forwards.unserved import Unserved
from torch_armllm.patching.forwards.watched_modules import WatchedModules
from torch_armllm.plan.step import Plan
from torch_armllm.system.forks import warn_if_forked

AnyCalls = TypeVar("AnyCalls", bound=Calls, covariant=True)


class _OfThread(local):
    """Wishes of a thread for its own calls."""

    modules_only: str | None = None
    """The reason why calls run module by module."""
    answer: Callable[[CallArguments], Any] | None = None
    """Answers calls in the place of the plan and the modules."""


class PatchedForward(Generic[AnyCalls]):
    """``forward`` of a module: a plan, or the module's own if no plan serves a call.

    Args:
        calls: computes the calls by a plan.
    """

    def __init__(self, calls: AnyCalls) -> None:
        self.calls = calls
        self.base: nn.Module = calls.base
        self.__signature__ = inspect.signature(calls.module_forward)  # pipelines and trainers ask for names
        self._names = tuple(self.__signature__.parameters)
        self._warned: set[str] = set()
        self._of_thread = _OfThread()
        self._lock = RLock()  # the steps of threads follow each other in the plan anyway
        self._watched: WatchedModules | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module; its own ``forward`` documents the arguments."""
        warn_if_forked()
        named = {**dict(zip(self._names, args, strict=False)), **kwargs}
        call = CallArguments(named, take_cache(named))
        if self._of_thread.answer is not None:
            return self._of_thread.answer(call)
        try:
            self._raise_if_by_modules(call)
            with self._lock:
                return self.calls.compute(call)
        except Unserved as reason:
            self._warn(str(reason))
        with self._lock if self.calls.changes_modules else nullcontext():
            return self.calls.by_modules(call)

    @property
    def plan(self: PatchedForward[TokenCalls]) -> Plan:
        """Computes hidden states of a step."""
        return self.calls.plan

    @property
    def shape(self: PatchedForward[TokenCalls]) -> Shape:
        """Shape of the cache that steps write and read."""
        return self.calls.shape

    @contextmanager
    def returning(self: PatchedForward[TokenCalls], hidden: Tensor) -> Iterator[None]:
        """Makes calls return these hidden states ``(batch, T, hidden)`` while the context lasts.

        The model then computes only the part after its base model.
        """
        self._of_thread.answer = functools.partial(self.calls.output, hidden, None)
        try:
            yield
        finally:
            self._of_thread.answer = None

    @contextmanager
    def by_modules(self, reason: str) -> Iterator[None]:
        """Runs every call of this thread module by module while the context lasts."""
        before, self._of_thread.modules_only = self._of_thread.modules_only, reason
        try:
            yield
        finally:
            self._of_thread.modules_only = before

    @property
    def is_by_modules(self) -> bool:
        """True while `by_modules` lasts."""
        return self._of_thread.modules_only is not None

    def watch(self) -> None:
        """Lets calls run module by module as soon as the modules differ from what they are now."""
        self._watched = WatchedModules(self.base)

    def _raise_if_by_modules(self, call: CallArguments) -> None:
        """Raises `Unserved` while `by_modules` lasts, and if the modules have changed since `watch`."""
        if self._of_thread.modules_only is not None:
            raise Unserved(self._of_thread.modules_only)
        change = None if self._watched is None else self._watched.change(self.calls.reads_weights(call))
        if change is not None:
            raise Unserved(f"{change} after patch (unpatch and patch the model to get a plan of it)")

    def _warn(self, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(
                f"torch_armllm: {reason}; such calls run module by module, which is slower", stacklevel=4
            )


def with_gradients_by_modules(model: nn.Module, *patched: PatchedForward[Calls]) -> Callable[..., Any]:
    """Wraps the model's own ``forward`` so that the modules compute a loss that is to be differentiated."""
    own = model.forward

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        has_loss = kwargs.get("labels") is not None and torch.is_grad_enabled()
        if has_loss and any(p.requires_grad for p in model.parameters()):
            with ExitStack() as stack:
                for each in patched:
                    stack.enter_context(each.by_modules("labels are given and gradients are enabled"))
                return own(*args, **kwargs)
        return own(*args, **kwargs)

    return forward
