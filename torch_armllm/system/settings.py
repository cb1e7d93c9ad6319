"""Declarations of settings: a field of a dataclass says what errors, options and pages tell of it."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Kind:
    """Values that a setting takes.

    Attributes:
        name: by which the command line finds how a text is read.
        give: the remedy, for errors.
        accepts: True for a value of the right type.
        error: type of the error of another value.
        least: lower bound; None: it depends on other settings, and is checked with them.
        most: upper bound.
        choices: names of all values.
        words: names that stand beside numbers.
        inspect: raises an error for what is wrong inside of a value.
        shown: a value in a help; empty: by the kind's name.
    """

    name: str
    give: str = ""
    accepts: Callable[[Any], bool] = lambda value: True
    error: type[Exception] = TypeError
    least: int | None = None
    most: int | None = None
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    inspect: Callable[[Any], None] = lambda value: None
    shown: str = ""

    def within(self, least: int | None, most: int | None, *words: str) -> Kind:
        """Returns these values within bounds."""
        return replace(self, least=least, most=most, words=words)

    def check(self, name: str, value: Any) -> None:
        """Checks a value.

        Raises:
            TypeError: it is of another type.
            ValueError: it is out of bounds, or no choice.
        """
        if (value is None and not self.choices) or (isinstance(value, str) and value in self.words):
            return
        if not self.accepts(value):
            raise self.error(f"{name} = {value!r}: give {self.give}")
        self.inspect(value)
        if isinstance(value, Real) and not isinstance(value, Integral) and not math.isfinite(value):
            raise ValueError(f"{name} = {value}: give a finite number")
        if self.most is not None and int(value) > self.most:
            raise ValueError(f"{name} = {value}: give at most {self.most}")
        if self.least is not None and int(value) < self.least:
            raise ValueError(f"{name} = {value}: give at least {self.least}")


def is_integer(value: Any) -> bool:
    """True for a whole number, of Python or of NumPy; not for True and False."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike))


def _are_texts(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and all(isinstance(text, str) for text in value)
    )


def choice(names: Sequence[str], give: str = "", kind: str = "choice") -> Kind:
    """Returns the kind of one of several names."""
    known = tuple(names)
    return Kind(
        kind,
        give or " or ".join(known),
        lambda value: isinstance(value, str) and value in known,
        ValueError,
        choices=known,
    )


INTEGER = Kind("integer", "an integer", is_integer)
COUNT = replace(INTEGER, name="count")
RANKS = replace(INTEGER, name="ranks")
PORT = replace(INTEGER, name="port")
SIZE = replace(INTEGER, name="size")
"""A number of bytes."""
MEMORY = Kind("memory", "a number", _is_number)
"""A number of bytes, or a fraction of the free memory."""
SECONDS = replace(MEMORY, name="seconds")
SWITCH = Kind("switch", "True or False", lambda value: isinstance(value, bool))
FLAG = replace(SWITCH, name="flag")
"""A switch that is off by default; its option has no opposite."""
TEXT = Kind("text", "a text", lambda value: isinstance(value, str))
TEXTS = Kind("texts", "a list of texts", _are_texts)
OBJECT = Kind("object", "a dict", lambda value: isinstance(value, Mapping))
FOLDER = Kind("folder", "the path of a folder", _is_path)
INPUT_FILE = Kind("input file", "the path of a file", _is_path)
OUTPUT_FILE = Kind("output file", "the path of a file", _is_path)


@dataclass(frozen=True)
class Setting:
    """A declared setting.

    Attributes:
        kind: values that it takes.
        text: short meaning, without a capital and a full stop; names of other settings stand in backquotes.
        more: further sentences, which the command line leaves out.
        none: meaning of None, or of leaving it out.
        option: its option on the command line; empty: by its name; None: it has none.
    """

    kind: Kind
    text: str
    more: str = ""
    none: str = ""
    option: str | None = ""

    @property
    def meaning(self) -> str:
        """All sentences about it."""
        sentences = [f"{self.text}.", self.more, f"None: {self.none}." if self.none else ""]
        return " ".join(filter(None, sentences))


def setting(
    default: Any,
    kind: Kind,
    text: str,
    more: str = "",
    *,
    none: str = "",
    option: str | None = "",
    secret: bool = False,
) -> Any:
    """Returns a field of a dataclass that is a setting.

    Args:
        default: its value if it is not given.
        kind: see `Setting`, as for the other arguments.
        text: see there.
        more: see there.
        none: see there.
        option: see there.
        secret: leaves its value out of what is printed.
    """
    declared = Setting(kind, text, more, none, option)
    return field(default=default, repr=not secret, metadata={"setting": declared})


def settings_of(owner: Any) -> Iterator[tuple[Field[Any], Setting]]:
    """Yields the fields of a dataclass, or of an instance, that are settings, with what they declare."""
    for each in fields(owner):
        if "setting" in each.metadata:
            yield each, each.metadata["setting"]


def setting_named(owner: Any, name: str) -> Setting:
    """Returns the declaration of a setting."""
    return next(declared for each, declared in settings_of(owner) if each.name == name)


def check_settings(owner: Any) -> None:
    """Checks the type and the bounds of every setting of an instance.

    Raises:
        TypeError: a setting is of another type.
        ValueError: a setting is out of its bounds.
    """
    for each, declared in settings_of(owner):
        declared.kind.check(each.name, getattr(owner, each.name))


def described(owner: type[T]) -> type[T]:
    """Writes the meanings of a dataclass's settings into its docstring."""
    rows = [f"{each.name}: {declared.meaning}" for each, declared in settings_of(owner)]
    wrapped = [textwrap.fill(row, 110, initial_indent=" " * 8, subsequent_indent=" " * 12) for row in rows]
    own = (owner.__doc__ or "").rstrip()
    begun = [] if "\n    Attributes:\n" in own else ["\n    Attributes:"]
    owner.__doc__ = "\n".join([own, *begun, *wrapped, "    "])
    return owner
