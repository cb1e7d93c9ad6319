"""Outputs of several messages, each behind a header with its channel or its recipient."""

from __future__ import annotations

import re
from typing import Any

from torch_armllm.chat_format.cursor import MOST_SPACE, Markers, Wait
from torch_armllm.chat_format.format import ChatFormat
from torch_armllm.chat_format.json_text import json_value
from torch_armllm.chat_format.parser import FormatParser, Tools

START, MESSAGE = "<|start|>", "<|message|>"
ENDS = frozenset({"<|end|>", "<|call|>", "<|return|>", "<|eom|>", "<|eot|>", START})
_ENDS = sorted(ENDS)
_BEGINNINGS = ("<|channel|>", "<|constrain|>", "to=", "assistant", MESSAGE)
_BODY_ENDS = Markers(ENDS | {"<|channel|>"})
_HEADER_ENDS = Markers({MESSAGE, *ENDS})
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTIONS = "functions."


class MessagesParser(FormatParser):
    """An `OutputParser` of outputs of several messages.

    Text without a header is content; so is a call of a function that is not among the tools.  Messages for
    others than the user, such as a container, are for no one who could read them.
    """

    def __init__(self, format: ChatFormat, tools: Tools | None = None, **how: Any) -> None:
        super().__init__(format, tools, **how)
        self._names = frozenset(tools or ())

    def _message(self) -> Wait[None]:
        part = self._begins_in
        while True:
            if part == "reasoning":
                yield from self._plain(self.writer.reasoning)
                self.writer.end_reasoning()
            elif part == "content":
                yield from self._plain(self.writer.content)
            if not (yield from self.cursor.more()):
                return
            part = ""
            yield from self._headed()
            if not (yield from self.cursor.more()):
                return

    def _plain(self, emit: Any) -> Wait[None]:
        """Reads a body up to its end."""
        while True:
            marker = yield from self.cursor.until(_BODY_ENDS, emit)
            if marker is None or marker in ENDS:
                return
            if (yield from self._is_channel()):
                return
            emit(self.cursor.take(len(marker)))

    def _is_channel(self) -> Wait[bool]:
        """True if a channel's name follows, rather than text that mentions one."""
        names = ("analysis", "commentary", "final")
        for name in names:
            if (yield from self.cursor.follows("<|channel|>" + name)):
                return True
        return False

    def _headed(self) -> Wait[None]:
        """Reads a message with its header."""
        space = [(yield from self.cursor.space())]
        for end in _ENDS:
            while (yield from self.cursor.accept(end)):
                space = [(yield from self.cursor.space())]
        for beginning in _BEGINNINGS:
            if (yield from self.cursor.follows(beginning)):
                break
        else:
            self.writer.content("".join(space))
            yield from self._plain(self.writer.content)
            return
        header: list[str] = []
        marker = yield from self.cursor.until(_HEADER_ENDS, header.append)
        text = "".join(header)
        if marker == MESSAGE:
            self.cursor.take(len(MESSAGE))
            yield from self._body(text)
        else:
            self._loose(text)

    def _loose(self, text: str) -> None:
        """Adds text that stands where a header should."""
        text = text.strip().removeprefix("assistant").strip()
        if text and not text.startswith(("<|channel|>", "to=")):
            self.writer.content(text)

    def _body(self, header: str) -> Wait[None]:
        recipients, channels = _RECIPIENT.findall(header), _CHANNEL.findall(header)
        recipient = recipients[-1] if recipients else ""
        channel = channels[-1] if channels else ""
        name = recipient.removeprefix(_FUNCTIONS)
        if self._format.messages == "recipients":
            yield from self._to_recipient(recipient)
        elif name in self._names:
            yield from self._call(name)
        elif recipient.startswith(_FUNCTIONS):
            self.writer.content(header + MESSAGE)
            yield from self._plain(self.writer.content)
        elif channel == "analysis" and recipient in ("", "assistant", "user"):
            self.writer.tag(header.lstrip() + MESSAGE)
            yield from self._plain(self.writer.reasoning)
            if (yield from self.cursor.follows("<|end|>")):
                self.writer.tag("<|end|>")
            self.writer.end_reasoning()
        elif recipient in ("", "assistant", "user"):
            yield from self._plain(self.writer.content)
        else:
            yield from self._plain(lambda text: None)

    def _to_recipient(self, recipient: str) -> Wait[None]:
        if recipient == "self":
            yield from self._plain(self.writer.reasoning)
            self.writer.end_reasoning()
            return
        calls = self._calls
        markers = Markers(ENDS | (frozenset() if calls is None else calls.triggers))
        while True:
            marker = yield from self.cursor.until(markers, self.writer.content)
            if marker is None or marker in ENDS:
                return
            if calls is None or not (yield from calls.read()):
                self.writer.content(self.cursor.take(len(marker)))

    def _call(self, name: str) -> Wait[None]:
        """Reads the arguments of a call."""
        self.writer.begin_call(name, None)
        yield from self.cursor.space(MOST_SPACE)
        if (yield from self.cursor.follows("{")):
            whole = yield from json_value(self.cursor, self.writer.arguments)
            if whole:
                self.writer.end_call(self.cursor.place)
                yield from self._plain(lambda text: None)
            return
        pieces: list[str] = []
        yield from self._plain(pieces.append)
        self.writer.arguments("".join(pieces).strip() or "{}")
        self.writer.end_call(self.cursor.place)
