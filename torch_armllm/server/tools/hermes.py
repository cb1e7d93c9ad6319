"""Tool parser of Hermes and Qwen models: ``<tool_call>{"name": …, "arguments": …}</tool_call>``."""

from __future__ import annotations

from torch_armllm.server.tools.held_text import HeldText
from torch_armllm.server.tools.parser import (
    CallBuilder,
    OutputDelta,
    parse_call,
    parse_json_values,
    partial_marker_length,
)

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesToolParser:
    """A `ToolParser`; text between the markers that is no call becomes content.

    Whitespace is held back until it is known whether a call follows, because it then belongs to the call.
    """

    def __init__(self) -> None:
        self._rest = ""  # may be the beginning of a marker
        self._call = HeldText()
        self._spaces = HeldText()
        self._inside = False
        self._builder = CallBuilder()
        self._has_calls = False

    def feed(self, text: str) -> OutputDelta:
        """See `ToolParser`."""
        delta, content = OutputDelta(), HeldText()
        text, at = self._rest + text, 0
        marker = END if self._inside else BEGIN
        while (position := text.find(marker, at)) >= 0:
            if self._inside:
                self._call.add(text[at:position])
                self._add_calls(self._call.take(), END, delta, content)
            else:
                self._add_content(text[at:position], content)
                self._spaces.take()  # belongs to the call
            at = position + len(marker)
            self._inside = not self._inside
            marker = END if self._inside else BEGIN
        end = max(at, len(text) - partial_marker_length(text, marker))
        if self._inside:
            self._call.add(text[at:end])
        else:
            self._add_content(text[at:end], content)
        self._rest = text[end:]
        delta.content = content.take()
        return delta

    def finish(self) -> OutputDelta:
        """See `ToolParser`; the last end marker may be missing."""
        delta, content = OutputDelta(), HeldText()
        if self._inside:
            self._call.add(self._rest)
            self._add_calls(self._call.take(), "", delta, content)
        else:
            self._add_content(self._rest, content)
            if not self._has_calls:
                content.add(self._spaces.take())
        self._rest = ""
        delta.content = content.take()
        return delta

    def _add_calls(self, text: str, end: str, delta: OutputDelta, content: HeldText) -> None:
        try:
            values = [parse_call(value) for value in parse_json_values(text)]
        except ValueError:
            values = [None]
        calls = [call for call in values if call is not None]
        if not calls or len(calls) < len(values):
            content.add(BEGIN + text + end)
            return
        self._has_calls = True
        delta.calls += [self._builder.build(*call) for call in calls]

    def _add_content(self, text: str, content: HeldText) -> None:
        """Adds content, and holds back the white space at its end."""
        if shown := text.rstrip():
            content.add(self._spaces.take())
            content.add(shown)
        self._spaces.add(text[len(shown) :])
