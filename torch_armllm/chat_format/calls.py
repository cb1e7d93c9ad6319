"""Reading of tool calls: their markers and names; each kind of syntax has a file of its own."""

from __future__ import annotations

import re
from typing import Protocol

from torch_armllm.chat_format.cursor import MOST_SPACE, Cursor, Wait
from torch_armllm.chat_format.format import HOLES, ID, INDEX, TYPE, CallFormat, tokens
from torch_armllm.chat_format.typed_values import ToolSchemas
from torch_armllm.chat_format.writer import Writer

_HOLE_CHARACTERS = {ID: re.compile(r"[\w.:-]*"), INDEX: re.compile(r"\d*"), TYPE: re.compile(r"\w*")}
_NUMBER = re.compile(rf"[:_.-]?{INDEX}")
_QUOTES = "\"'"
_MOST_IN_HOLE = 100
_SEPARATORS = (",", ";")


class CallSyntax(Protocol):
    """Reads the calls of one kind of syntax."""

    triggers: frozenset[str]
    """Texts that a call may begin with."""
    marks: frozenset[str]
    """Those that a text does not hold by chance: calls may begin with them within reasoning."""

    def read(self) -> Wait[bool]:
        """Reads a call at the cursor; returns False, and reads nothing, if there is none."""
        ...


class MarkedCalls:
    """Base of the kinds of syntax: finds where calls begin, and what follows them.

    Args:
        cursor: the text.
        writer: takes the calls.
        tools: the tools that may be called.
        format: markers of the calls.

    Attributes:
        quote: what the model wrote in the place of the last quote of a marker.
    """

    quote = '"'

    def __init__(self, cursor: Cursor, writer: Writer, tools: ToolSchemas, format: CallFormat) -> None:
        self.cursor, self.writer, self.tools, self.format = cursor, writer, tools, format
        self._name_end = tokens(format.name_end)
        self._name_ends = [self._name_end, *map(tokens, format.name_ends)]
        if format.id_around_name:  # the number of the call is left out
            self._name_ends.append(tokens(_NUMBER.sub("", format.name_end)))
        self._starts: dict[str, list[int]] = {}
        for position, token in enumerate(format.opening):
            begins = position in (0, len(tokens(format.section_begin)))
            if token not in HOLES and (begins or (token[0] in "<[" and len(token) > 1)):
                self._starts.setdefault(token, []).append(position)
        self._openers = list(map(tokens, format.openers))
        self._separator = separator = tokens(format.separator)
        if separator and separator[0][0] in "<[" and len(separator[0]) > 1:  # between content and a call, too
            self._openers.append(separator + tokens(format.begin))
        self.triggers = self.find_triggers() | {parts[0] for parts in self._openers}
        self.marks = frozenset(each for each in self.triggers if each not in tools and each not in "{[")

    def find_triggers(self) -> frozenset[str]:
        """Returns the texts that a call may begin with: any tag of the markers, as models leave some out."""
        return frozenset(self._starts)

    def read(self) -> Wait[bool]:
        """See `CallSyntax`; reads all calls that follow each other."""
        if not (yield from self._attempt()):
            return False
        while True:
            end = self.cursor.place
            self.cursor.mark()
            yield from self.cursor.space(MOST_SPACE)
            closed = yield from self._closes()
            self.writer.end_call(self.cursor.place if closed else end)
            if closed or (yield from self._next()):
                self.cursor.forget()
            else:
                self.cursor.back()
                return True

    def _closes(self) -> Wait[bool]:
        for parts in self.format.closing:
            longer = [each for each in self._starts if each != parts[0] and each.startswith(parts[0])]
            if (yield from self._any_follows(longer)):
                continue
            self.cursor.mark()
            if (yield from self.pieces(parts)) is not None:
                self.cursor.forget()
                return True
            self.cursor.back()
        return False

    def _any_follows(self, texts: list[str]) -> Wait[bool]:
        for text in texts:
            if (yield from self.cursor.follows(text)):
                return True
        return False

    def _next(self) -> Wait[bool]:
        if (yield from self._attempt()):
            return True
        self.cursor.mark()
        if self._separator and (yield from self.pieces(self._separator)) is not None:
            yield from self.cursor.space(MOST_SPACE)
            if (yield from self._attempt()):
                self.cursor.forget()
                return True
        self.cursor.back()
        for separator in _SEPARATORS:
            if (yield from self.cursor.accept(separator)):
                yield from self.cursor.space(MOST_SPACE)
                return (yield from self._attempt())
        return False

    def _attempt(self) -> Wait[bool]:
        """Reads one call with what is before it; reads nothing if there is none."""
        for token, starts in self._starts.items():
            if not (yield from self.cursor.follows(token)):
                continue
            for start in starts:
                if (yield from self._opened(self.format.opening[start:])):
                    return True
                if self.format.id_around_name and (yield from self._opened(self.format.opening[start:-1])):
                    return True
        for parts in self._openers:
            if (yield from self.cursor.follows(parts[0])) and (yield from self._opened(parts)):
                return True
        return False

    def _opened(self, opening: tuple[str, ...]) -> Wait[bool]:
        """Reads a call behind its markers; reads nothing if there is none."""
        self.cursor.mark()
        holes = yield from self.pieces(opening)
        if holes is not None:
            yield from self.cursor.space(MOST_SPACE)
            if (yield from self.call(holes)):
                return True  # `call` has forgotten the mark
        self.cursor.back()
        return False

    def call(self, holes: dict[str, str]) -> Wait[bool]:
        """Reads a call from its name or JSON value on.

        Forgets the cursor's mark once it is certain that this is a call; returns False before that.
        """
        raise NotImplementedError

    def begun(self, holes: dict[str, str]) -> Wait[str | None]:
        """Begins a call if the name of a tool follows, and returns that; what is in holes may be its id."""
        found = yield from self.name()
        if found is None:
            return None
        name, after = found
        self.begin(name, self.call_id(name, holes, after))
        return name

    def begin(self, name: str, call_id: str | None) -> None:
        """Begins a call: what was read is no text."""
        self.cursor.forget()
        self.writer.begin_call(name, call_id)

    def pieces(self, parts: tuple[str, ...]) -> Wait[dict[str, str] | None]:
        """Reads the parts of a marker, with free white space between them; returns what is in its holes."""
        holes: dict[str, str] = {}
        for position, part in enumerate(parts):
            if position:
                yield from self.cursor.space(MOST_SPACE)
            if part in HOLES:
                holes[part] = yield from self.cursor.matches(_HOLE_CHARACTERS[part], _MOST_IN_HOLE)
                if not holes[part]:
                    return None
            elif not (yield from self._piece(part)):
                return None
        return holes

    def _piece(self, part: str) -> Wait[bool]:
        """Reads a part of a marker, whose attributes may have other quotes than the format's, or none."""
        if (yield from self.cursor.accept(part)):
            if '"' in part:
                self.quote = '"'
            elif part.endswith("="):
                yield from self._quote()
            return True
        if '"' in part:
            for quote in ("'", ""):
                if (other := part.replace('"', quote)) and (yield from self.cursor.accept(other)):
                    self.quote = quote
                    return True
        if part == ">" and (yield from self._quote()):
            return (yield from self.cursor.accept(part))
        return False

    def _quote(self) -> Wait[bool]:
        for quote in _QUOTES:
            if (yield from self.cursor.accept(quote)):
                return True
        return False

    def name(self) -> Wait[tuple[str, dict[str, str]] | None]:
        """Reads the name of a tool and what ends it; returns None if there is none."""
        for name in self.tools.by_length:
            if not (yield from self.cursor.follows(name)):
                continue
            for parts in self._name_ends:
                self.cursor.mark()
                self.cursor.take(len(name))
                yield from self.cursor.space(MOST_SPACE)
                holes = yield from self.pieces(parts)
                if holes is not None and (parts or (yield from self.ends_name())):
                    self.cursor.forget()
                    return name, holes
                self.cursor.back()
        return None

    def ends_name(self) -> Wait[bool]:
        """True if what follows can follow a name, where no marker does."""
        return (yield from self.cursor.follows("{"))

    def ends_whole(self) -> Wait[bool]:
        """True if more text follows, or the model ended here by itself: the call is not cut off."""
        self.cursor.mark()
        yield from self.cursor.space(MOST_SPACE)
        more = yield from self.cursor.more()
        if more and self.cursor.cut:  # perhaps a half marker
            more = yield from self._closes()
        self.cursor.back()
        return more or not self.cursor.cut

    def call_id(self, name: str, before: dict[str, str], after: dict[str, str]) -> str | None:
        """Returns the id that the model has written."""
        if self.format.id_around_name:
            prefix, suffix = self.format.opening[-1], self._name_end[:2]
            prefix = "" if prefix[0] in "<[" else prefix
            return prefix + name + "".join(after.get(token, token) for token in suffix)
        return after.get(ID) or before.get(ID)
