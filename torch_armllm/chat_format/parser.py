"""The parser of all chat formats: splits an output into reasoning, content and calls as it streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_armllm.chat_format.any_calls import syntax_of
from torch_armllm.chat_format.calls import CallSyntax
from torch_armllm.chat_format.cursor import MOST_SPACE, Cursor, Markers, Wait
from torch_armllm.chat_format.deltas import OutputDelta
from torch_armllm.chat_format.fence import Fence
from torch_armllm.chat_format.format import ChatFormat, tokens
from torch_armllm.chat_format.typed_values import ToolSchemas
from torch_armllm.chat_format.writer import Writer

Tools = Mapping[str, Mapping[str, Any] | None]
"""Name and JSON schema of the arguments of each tool."""


class FormatParser:
    """An `OutputParser` of a format.

    Args:
        format: the format.
        tools: name and JSON schema of the arguments of each tool; empty: there are no calls.
        begins_in: part that the output begins within: ``""``, ``"reasoning"`` or ``"content"``.
        continued: True if the output continues a message, whose white space counts.
        reasoning_is_content: True if reasoning and its tags stay in the content.
        fenced: True if the content is to be JSON alone, and a code fence around it is left out.

    Attributes:
        part: that the text so far ends within.
    """

    def __init__(
        self,
        format: ChatFormat,
        tools: Tools | None = None,
        begins_in: str = "",
        continued: bool = False,
        reasoning_is_content: bool = False,
        fenced: bool = False,
    ) -> None:
        self._format = format
        self.cursor, self.writer = Cursor(), Writer(reasoning_is_content, continued)
        self._calls: CallSyntax | None = None
        if tools and format.calls is not None:
            self._calls = syntax_of(self.cursor, self.writer, ToolSchemas(tools), format.calls)
        self._begins_in = self.part = begins_in
        self._ending = tokens(format.turn_end)
        self._unread = ""  # of the prompt's end, which the parser reads
        if format.begun and not begins_in:
            self._unread = format.begun
            self.cursor.add(format.begun)
        self._before = len(self._unread)
        self._running = self._message()
        self._ended = False
        self._fence = Fence() if fenced else None

    def feed(self, text: str) -> OutputDelta:
        """See `OutputParser`."""
        if text and not self._ended:
            self.cursor.add(text)
            self._run()
        delta = self.writer.delta()
        if self._fence is not None:
            delta.content = self._fence.feed(delta.content)
        return delta

    def finish(self, reason: str | None = "stop") -> OutputDelta:
        """See `OutputParser`; a call that was cut off has the arguments so far."""
        self.cursor.ended = True
        self.cursor.cut = reason == "length"
        self._run()
        self.writer.finish()
        delta = self.writer.delta()
        if self._fence is not None:
            delta.content = self._fence.feed(delta.content) + self._fence.finish()
        return delta

    @property
    def first_call_end(self) -> int | None:
        """Characters of the text up to the end of its first call; None before that is certain."""
        end = self.writer.first_call_end
        return None if end is None or self.writer.is_holding else end - self._before

    def _run(self) -> None:
        if not self._ended:
            try:
                next(self._running)
            except StopIteration:
                self._ended = True

    def _message(self) -> Wait[None]:
        """Parses a message: reasoning, then content and calls."""
        part = self._begins_in or (yield from self._part())
        while part:
            self.part = part
            if part == "reasoning":
                part = yield from self._reasoning()
            else:
                part = yield from self._content()

    def _part(self) -> Wait[str]:
        """Reads the markers at the beginning of a part; returns its name."""
        format, reasoning = self._format, self._format.reasoning
        pieces: list[str] = []
        skipped = False
        while True:
            pieces.append((yield from self.cursor.space()))
            if reasoning is not None and (yield from self.cursor.accept(reasoning.begin)):
                self.writer.tag("".join(pieces) + reasoning.begin)
                return "reasoning"
            if reasoning is not None and (yield from self.cursor.accept(reasoning.end)):
                self.writer.tag("".join(pieces) + reasoning.end)
                self.writer.end_reasoning()
            elif format.content_begin and (yield from self._accepts(format.content_begin)):
                self.writer.trim()
                return "content"
            elif not (skipped or not format.header) and (yield from self._accepts(format.header)):
                skipped = True
            else:
                self.writer.content("".join(pieces))
                return "content"
            pieces = []

    def _accepts(self, marker: str) -> Wait[bool]:
        """Reads a marker whose white space is free."""
        self.cursor.mark()
        for token in tokens(marker):
            yield from self.cursor.space(MOST_SPACE)
            if not (yield from self.cursor.accept(token)):
                self.cursor.back()
                return False
        self.cursor.forget()
        return True

    def _reasoning(self) -> Wait[str]:
        """Reads reasoning; returns the part that follows, or nothing at the end."""
        reasoning, content_begin = self._format.reasoning, self._format.content_begin
        end = reasoning.end if reasoning is not None else ""
        first = (tokens(content_begin) or ("",))[0]
        triggers = frozenset() if self._calls is None else self._calls.marks
        markers = Markers({end, first} | triggers)
        while True:
            marker = yield from self.cursor.until(markers, self.writer.reasoning)
            if marker is None:
                return ""
            if marker == end:
                self._end_reasoning(end)
                return (yield from self._part())
            if marker == first and (yield from self.cursor.follows(content_begin)):
                self.writer.end_reasoning()
                return (yield from self._part())
            if marker not in triggers or self._calls is None:
                self.writer.reasoning(self.cursor.take(len(marker)))
                continue
            self.cursor.record()
            self.writer.hold()
            if not (yield from self._calls.read()):
                self.cursor.recorded()
                self.writer.drop()
                self.writer.reasoning(self.cursor.take(len(marker)))
            elif (yield from self._content(end)):  # the reasoning goes on behind it
                self.writer.drop()
                self.writer.reasoning(self.cursor.recorded())
            else:
                self.cursor.recorded()
                self.writer.release()
                return ""

    def _end_reasoning(self, end: str) -> None:
        self.writer.tag(self.cursor.take(len(end)))
        self.writer.end_reasoning()

    def _content(self, until: str = "") -> Wait[str]:
        """Reads content and calls; returns the part that follows, or nothing at the end.

        Args:
            until: a marker to stop at.
        """
        format = self._format
        triggers = frozenset() if self._calls is None else self._calls.triggers
        first_end = self._ending[0] if self._ending else ""
        repeats = format.reasoning is not None and format.reasoning.repeats
        more = format.reasoning.begin if format.reasoning is not None and repeats else ""
        stray = format.reasoning.end if format.reasoning is not None and repeats else ""
        end = format.content_end
        first = (tokens(end) or ("",))[0]
        markers = Markers({until, first_end, first, more, stray} | triggers)
        while True:
            marker = yield from self.cursor.until(markers, self.writer.content)
            if marker is None:
                return ""
            if marker == until:
                return "reasoning"
            if marker in triggers and self._calls is not None and (yield from self._calls.read()):
                self.writer.trim()
            elif marker == stray:
                self.writer.tag(self.cursor.take(len(marker)))
            elif marker == more:
                self.writer.trim()
                return (yield from self._part())
            elif marker == first and (yield from self._accepts(end)):
                return (yield from self._part())
            elif marker == first_end and (yield from self._turn_ends()):
                if self.cursor.ended and not (yield from self.cursor.more()):
                    return ""
                return (yield from self._part())
            elif (yield from self.cursor.more()):
                text = self.cursor.take(len(marker))
                self.writer.content(text.removeprefix(self._unread))
            self._unread = ""

    def _turn_ends(self) -> Wait[bool]:
        """Reads the end of the message, if nothing but another message follows it."""
        self.cursor.mark()
        for token in self._ending:
            if not (yield from self.cursor.accept(token)):
                break
            yield from self.cursor.space(MOST_SPACE)
        if not (yield from self.cursor.more()):
            self.cursor.forget()
            return True
        header = self._format.header
        if header and (yield from self.cursor.follows(header.strip())):
            self.cursor.forget()
            return True
        self.cursor.back()
        return False
