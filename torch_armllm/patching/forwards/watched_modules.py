"""Modules whose weights a plan was made from, and what has changed in them since."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from torch_armllm.lora.expert_slots import ExpertSlots
from torch_armllm.lora.slots import LoraSlots

_SAMPLE = 8  # bytes
_version = attrgetter("_version")
_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


class WatchedModules:
    """A module and all modules in it, as they were when a plan was made.

    Every call asks for changes, so they are looked for by as little work as finds those that people make:
    other modules, parameters or buffers in the place of some (adapters, resized embeddings), hooks, other
    ``forward`` functions, and other values of weights, of which a few bytes of each are compared.

    Args:
        base: the module.  Its own hooks do not matter, as they run around the plan.
    """

    def __init__(self, base: nn.Module) -> None:
        modules = [m for m in base.modules() if not isinstance(m, LoraSlots | ExpertSlots)]
        self._modules = modules
        inner = (m for m in modules if m is not base)
        self._hooks: list[Any] = [getattr(torch_modules, name) for name in _HOOKS]
        self._hooks += chain.from_iterable((m._forward_hooks, m._forward_pre_hooks) for m in inner)
        self._dicts = [m.__dict__ for m in modules if m is not base]
        self._slots = [slots.values() for m in modules for slots in (m._modules, m._parameters) if slots]
        self._contents = list(chain.from_iterable(self._slots))
        self._buffers = [_buffers_of(m) for m in modules if m._buffers]
        self._held: list[Tensor | None] = list(chain.from_iterable(buffers() for buffers in self._buffers))
        weights = (*chain.from_iterable(m._parameters.values() for m in modules), *self._held)
        self._weights: list[Tensor] = [t for t in weights if t is not None]
        self._forwards = self._own_forwards()
        self._versions = list(map(_version, self._weights))
        self._addresses = list(map(Tensor.data_ptr, self._weights))
        self._dtypes = [t.dtype for t in self._weights]
        self._samples, self._storages = _samples_of(self._weights)
        self._values = b"".join(self._samples)
        self._has_other_forwards = False  # steps that read no weights go on as the one before
        self._harmless_hooks = 0  # number of them
        self._written: str | None = None

    def change(self, reads_weights: bool) -> str | None:
        """Returns what has changed, for a message; None if nothing has.

        Args:
            reads_weights: look at functions, and at versions, addresses and dtypes of weights too.  This
                takes three times as long: 0.1 ms for a model of 30 layers.
        """
        if any(self._hooks) and self._has_foreign_hooks():
            return "hooks were registered"
        if not _are_same(chain.from_iterable(self._slots), self._contents):
            return "modules or parameters were replaced"
        if reads_weights:
            self._has_other_forwards = self._own_forwards() != self._forwards
        if self._has_other_forwards:
            return "the forward of a module was replaced"
        if self._written is None and (self._is_written() or (reads_weights and self._is_another())):
            self._written = "weights were changed"
            self._samples, self._storages = [], []  # lets the memory of weights that were replaced go
        return self._written

    def _has_foreign_hooks(self) -> bool:
        """True if there are other hooks than those by which transformers records, which stay registered."""
        count = sum(map(len, self._hooks))
        if count != self._harmless_hooks:
            if any(not _is_ours(hook) for hooks in self._hooks for hook in hooks.values()):
                return True
            self._harmless_hooks = count
        return False

    def _own_forwards(self) -> list[Any]:
        """Returns the functions that stand in the place of modules' own ``forward``, but for plans."""
        own = [d["forward"] for d in self._dicts if "forward" in d]
        return [f for f in own if not _is_ours(f)] if own else own

    def _is_written(self) -> bool:
        return b"".join(self._samples) != self._values

    def _is_another(self) -> bool:
        weights = self._weights
        return (
            list(map(_version, weights)) != self._versions
            or list(map(Tensor.data_ptr, weights)) != self._addresses
            or any(t.dtype is not dtype for t, dtype in zip(weights, self._dtypes, strict=True))
            or not _are_same(chain.from_iterable(buffers() for buffers in self._buffers), self._held)
        )


def _buffers_of(module: nn.Module) -> Callable[[], list[Tensor | None]]:
    """Returns a function of the buffers that a checkpoint has; modules may rewrite the others."""
    names = [name for name in module._buffers if name not in module._non_persistent_buffers_set]
    return lambda: [module._buffers.get(name) for name in names]


def _are_same(found: Iterator[Any], expected: list[Any]) -> bool:
    try:
        return list(found) == expected  # compares by identity first; tensors are ambiguous or of other sizes
    except RuntimeError:
        return False


def _samples_of(weights: list[Tensor]) -> tuple[list[Any], list[Any]]:
    """Returns views of a few bytes in the middle of each parameter, and what keeps their memory."""
    samples: list[Any] = []
    storages: list[Any] = []
    for weight in weights:
        if isinstance(weight, nn.Parameter) and weight.is_contiguous() and weight.nbytes >= _SAMPLE:
            if weight.device.type != "cpu" or weight.layout is not torch.strided:
                continue
            middle = weight.data_ptr() + weight.nbytes // 2 // _SAMPLE * _SAMPLE
            middle = min(middle, weight.data_ptr() + weight.nbytes - _SAMPLE)
            samples.append((ctypes.c_char * _SAMPLE).from_address(middle))
            storages.append(weight.untyped_storage())
    return samples, storages


def has_hooks(module: nn.Module) -> bool:
    """True if a call of a module runs hooks that people registered."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(not _is_ours(hook) for hook in hooks)


def _is_ours(function: Any) -> bool:
    """True for what this package and transformers put in place: plans of towers, and recorders of outputs."""
    function = getattr(function, "func", function)
    return str(getattr(function, "__module__", "")).startswith(("torch_armllm.", "transformers."))
