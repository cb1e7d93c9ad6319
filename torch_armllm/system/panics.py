"""Panics of Rust libraries as errors of Python."""

from __future__ import annotations

from contextlib import ContextDecorator
from types import TracebackType


class PanicError(ValueError):
    """Rust code has panicked over its input, such as a text that a tokenizer's pattern gives up on."""


class _PanicsAsErrors(ContextDecorator):
    """Raises `PanicError` in the place of a panic.

    A panic is a `BaseException`, so no guard for errors of any kind sees it, and it ends threads and servers.
    It has a class of its own in each library, which none exports.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        """See `contextlib`."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """See `contextlib`."""
        if error is not None and not isinstance(error, Exception) and is_panic(error):
            raise PanicError(
                f"the tokenizer or another library of Rust gives up: {_first_line(error)}; change the text, "
                "or the pattern in tokenizer.json that reads it"
            ) from error


PANICS_AS_ERRORS = _PanicsAsErrors()
"""Around calls that end in Rust: of tokenizers, safetensors and llguidance; also a decorator."""


def is_panic(error: BaseException) -> bool:
    """True if an exception is a panic of a library that PyO3 binds."""
    return any(base.__name__ == "PanicException" for base in type(error).__mro__)


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0][:200] if lines else "no reason is given"
