"""Code that calls ops within what is traced, and is not traced."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils import _python_dispatch


def untraced() -> AbstractContextManager[None]:
    """Returns a context without the modes that trace or replace calls of ops; those of its caller come back.

    Raises:
        RuntimeError: torch has no such context any more: it has no public name.
    """
    disable = getattr(_python_dispatch, "_disable_current_modes", None)
    if disable is None:
        version = torch.__version__
        raise RuntimeError(f"torch {version} has no way to leave a call untraced; install an older one")
    untraced: AbstractContextManager[None] = disable()
    return untraced


def call_at_end(owner: object, function: Callable[..., Any], *arguments: Any) -> weakref.finalize[..., Any]:
    """Calls a function once an object is gone, and records none of its ops.

    The garbage collector may run while a graph is traced; what the function calls would become a part of it.
    """
    return weakref.finalize(owner, _call_untraced, function, *arguments)


def _call_untraced(function: Callable[..., Any], *arguments: Any) -> None:
    with untraced():
        function(*arguments)
