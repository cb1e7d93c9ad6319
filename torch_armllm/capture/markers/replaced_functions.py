"""Functions that stand in for those of a model's source files during a capture."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

Function = Callable[..., Any]


@contextlib.contextmanager
def replaced_functions(
    model: nn.Module, names: Iterable[str], replacement_of: Callable[[str, Function], Function | None]
) -> Iterator[None]:
    """Replaces functions by name in the source files of a model's modules while the context lasts.

    The functions are replaced for the whole process, so the caller must be alone with the model's code.

    Args:
        model: modules of all its parts count.
        names: names of functions, which a file may define or import.
        replacement_of: returns the replacement of a function with a name; None leaves it as it is.
    """
    names = tuple(names)
    replaced: list[tuple[dict[str, Any], str, Function]] = []
    try:
        for file in {type(module).__module__ for module in model.modules()}:
            variables = vars(sys.modules[file]) if file in sys.modules else {}
            for name in names:
                original = variables.get(name)
                if callable(original) and (replacement := replacement_of(name, original)) is not None:
                    replaced.append((variables, name, original))
                    variables[name] = replacement
        yield
    finally:
        for variables, name, original in replaced:
            variables[name] = original
