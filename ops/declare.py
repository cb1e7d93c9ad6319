"""Declarations of ops: a function's signature and text, and the shape and dtype of its result.

The compiled library has an op's schema, with the same names.  What a result looks like (the *fake*), and the
slow reference of an op, read its arguments by name: neither repeats the signature.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Annotated, Any, ParamSpec, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")
PerHead = Annotated[Tensor | None, "per head"]
"""An argument of float32 with a number for each query head, or none: ranks divide it with the heads."""


def _nothing(_: Any) -> None:
    """The result of ops that change their arguments alone."""


def op(
    result: Callable[[Any], Any] = _nothing,
) -> Callable[[Callable[Parameters, Returned]], Callable[Parameters, Returned]]:
    """Declares the op that has a function's name: the function, which has no body, calls it.

    Args:
        result: returns tensors like the op's results; its argument has the op's arguments by name.
    """

    def declare(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
        name = function.__name__
        fake(name, result)
        packet = getattr(torch.ops.armllm, name)
        parameters = inspect.signature(function).parameters.values()
        names = [parameter.name for parameter in parameters]
        defaults = [parameter.default for parameter in parameters]
        needed = defaults.count(inspect.Parameter.empty)

        @functools.wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
            returned: Returned
            if not kwargs and len(args) >= needed:
                returned = packet(*args, *defaults[len(args) :])
                return returned
            for place in range(max(needed, len(args)), len(names)):
                kwargs.setdefault(names[place], defaults[place])
            returned = packet(*args, **kwargs)
            return returned

        return call

    return declare


def per_head(declared: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of the arguments of an op that have a number for each query head."""
    hints = get_type_hints(declared, include_extras=True)
    return tuple(name for name, hint in hints.items() if PerHead in (hint, *get_args(hint)))


def fake(name: str, result: Callable[[Any], Any]) -> None:
    """Registers what an op returns for tensors without data; see `op`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return result(arguments(name, args, kwargs))

    torch.library.register_fake(f"armllm::{name}", run)


def reference(name: str) -> Callable[[Callable[[Any], Returned]], Callable[..., Returned]]:
    """Makes a function of an op's arguments by name one that is called like the op.

    Args:
        name: of the op.
    """

    def declare(function: Callable[[Any], Returned]) -> Callable[..., Returned]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Returned:
            return function(arguments(name, args, kwargs))

        return call

    return declare


def arguments(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns an object with the arguments of a call of an op by name; those left out have their defaults.

    Raises:
        TypeError: there are too many arguments, one of another name, or one is missing.
    """
    schema = getattr(torch.ops.armllm, name).default._schema.arguments
    names = [argument.name for argument in schema]
    unknown = kwargs.keys() - names
    if len(args) > len(names) or unknown:
        raise TypeError(f"{name} takes {', '.join(names)}, and not {', '.join(unknown) or 'more'}")
    found = dict(zip(names, args, strict=False)) | kwargs
    for argument in schema:
        if argument.name not in found:
            if not argument.has_default_value():
                raise TypeError(f"{name} needs {argument.name}")
            found[argument.name] = argument.default_value
    return SimpleNamespace(**found)
