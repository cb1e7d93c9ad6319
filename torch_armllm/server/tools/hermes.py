"""Tool parser of Hermes and Qwen models: ``<tool_call>{"name": …, "arguments": …}</tool_call>``."""

from __future__ import annotations

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
        self._text = ""
        self._inside = False
        self._builder = CallBuilder()
        self._has_calls = False

    def feed(self, text: str) -> OutputDelta:
        """See `ToolParser`."""
        self._text += text
        delta = OutputDelta()
        while (position := self._text.find(END if self._inside else BEGIN)) >= 0:
            before = self._text[:position]
            self._text = self._text[position + len(END if self._inside else BEGIN) :]
            if self._inside:
                self._add_calls(before, END, delta)
            else:
                self._add_content(before.rstrip(), delta)
            self._inside = not self._inside
        if not self._inside:
            content = self._text[: len(self._text) - partial_marker_length(self._text, BEGIN)].rstrip()
            self._add_content(content, delta)
            self._text = self._text[len(content) :]
        return delta

    def finish(self) -> OutputDelta:
        """See `ToolParser`; the last end marker may be missing."""
        delta = OutputDelta()
        if self._inside:
            self._add_calls(self._text, "", delta)
        else:
            self._add_content(self._text.rstrip() if self._has_calls else self._text, delta)
        self._text = ""
        return delta

    def _add_calls(self, text: str, end: str, delta: OutputDelta) -> None:
        try:
            values = [parse_call(value) for value in parse_json_values(text)]
        except ValueError:
            values = [None]
        calls = [call for call in values if call is not None]
        if not calls or len(calls) < len(values):
            delta.content += BEGIN + text + end
            return
        self._has_calls = True
        delta.calls += [self._builder.build(*call) for call in calls]

    def _add_content(self, text: str, delta: OutputDelta) -> None:
        delta.content += text.lstrip() if self._has_calls and not text.strip() else text
