"""Formats that structural tags consist of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Format:
    """Base of formats."""

    def parts(self) -> tuple[Format, ...]:
        """Returns the formats inside."""
        return ()

    def walk(self) -> Iterator[Format]:
        """Yields the format and all inside, in the order of the text."""
        yield self
        for part in self.parts():
            yield from part.walk()


@dataclass(frozen=True)
class Text(Format):
    """A text; parts of it that are special tokens of the tokenizer stand for them.

    Attributes:
        value: the text.
    """

    value: str


@dataclass(frozen=True)
class Token(Format):
    """A special token.

    Attributes:
        token: its text or its id.
    """

    token: str | int


@dataclass(frozen=True)
class Schema(Format):
    """JSON of a schema."""

    schema: dict[str, Any]


@dataclass(frozen=True)
class Regex(Format):
    """Text that a regular expression matches."""

    pattern: str


@dataclass(frozen=True)
class Grammar(Format):
    """Text of a grammar, see `StructuredOutputsParams`."""

    grammar: str


@dataclass(frozen=True)
class AnyText(Format):
    """Any text.

    Attributes:
        excludes: texts that it does not contain.
        max_chars: characters that it has at most.
    """

    excludes: tuple[str, ...] = ()
    max_chars: int | None = None


@dataclass(frozen=True)
class Several(Format):
    """Base of formats of formats."""

    elements: tuple[Format, ...]

    def parts(self) -> tuple[Format, ...]:
        """Returns the formats inside."""
        return self.elements


@dataclass(frozen=True)
class Chain(Several):
    """Formats after each other."""


@dataclass(frozen=True)
class Either(Several):
    """One of several formats."""


@dataclass(frozen=True)
class Repeat(Format):
    """A format, ``least`` to ``most`` times; None: without a limit."""

    content: Format
    least: int
    most: int | None

    def parts(self) -> tuple[Format, ...]:
        """Returns the formats inside."""
        return (self.content,)


@dataclass(frozen=True)
class Tag(Format):
    """A format between texts or tokens.

    Attributes:
        begin: before the content.
        content: the format.
        ends: one of them follows; none may be empty, unless it is the only one.
    """

    begin: Text | Token
    content: Format
    ends: tuple[Text | Token, ...]

    def parts(self) -> tuple[Format, ...]:
        """Returns the formats inside."""
        return (self.begin, self.content, *self.ends)


@dataclass(frozen=True)
class Triggered(Format):
    """Free text, in which a trigger begins one of the tags that begin with it.

    Attributes:
        triggers: without those that begin with another.
        tags: each begins with a trigger.
        at_least_one: True: the text begins with a tag.
        stop_after_first: True: nothing follows the first tag.
        excludes: what the free text does not contain.
    """

    triggers: tuple[str, ...]
    tags: tuple[Tag, ...]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: tuple[str, ...] = ()

    def parts(self) -> tuple[Format, ...]:
        """Returns the formats inside."""
        return self.tags


@dataclass(frozen=True)
class Separated(Format):
    """Tags with a text between them.

    Attributes:
        tags: any of them.
        separator: between two tags.
        at_least_one: False: there may be none.
        stop_after_first: True: one at most.
    """

    tags: tuple[Tag, ...]
    separator: str
    at_least_one: bool
    stop_after_first: bool

    def parts(self) -> tuple[Format, ...]:
        """Returns the formats inside."""
        return self.tags
