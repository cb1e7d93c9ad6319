"""Arguments of other engines' classes that a class of ours lacks: each is refused with the remedy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def refusing(remedies: Mapping[str, tuple[Any, str]]) -> Callable[[type[T]], type[T]]:
    """Returns a decorator of classes whose constructor refuses arguments by name, not by a bare TypeError.

    Args:
        remedies: the value that asks for nothing, as None does, and the remedy, by the argument's name.
    """

    def decorate(cls: type[T]) -> type[T]:
        plain = cls.__init__

        @functools.wraps(plain)
        def checked(self: T, *args: Any, **given: Any) -> None:
            for name in [name for name in given if name in remedies]:
                neutral, remedy = remedies[name]
                value = given.pop(name)
                if value is not None and value != neutral:
                    raise ValueError(f"{name}={value!r} is not supported by {cls.__name__} here: {remedy}")
            plain(self, *args, **given)

        cls.__init__ = checked  # type: ignore[assignment]
        return cls

    return decorate
