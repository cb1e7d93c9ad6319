"""Calls of a tool that runs code: a tag, then the code."""

from __future__ import annotations

import json

from torch_armllm.chat_format.cursor import MOST_SPACE, Cursor, Markers, Wait
from torch_armllm.chat_format.format import CallFormat
from torch_armllm.chat_format.json_text import json_value
from torch_armllm.chat_format.known import CODE_TAG
from torch_armllm.chat_format.python_calls import PythonCalls
from torch_armllm.chat_format.typed_values import ToolSchemas
from torch_armllm.chat_format.writer import Writer

_END = "<|eom_id|>"
_ENDS = Markers([_END, "<|eot_id|>"])
_TOOLS = ("python", "ipython", "code_interpreter")
"""Tools of Llama 3 and Functionary that take code."""


class CodeCalls:
    """A `CallSyntax`: behind the tag stand ``tool.call(key=value)``, or code for a tool that runs it.

    Args:
        cursor: the text.
        writer: takes the calls.
        tools: the tools that may be called.
    """

    def __init__(self, cursor: Cursor, writer: Writer, tools: ToolSchemas) -> None:
        self._cursor, self._writer, self._tools = cursor, writer, tools
        self._by_name = PythonCalls(
            cursor, writer, tools, CallFormat("python", begin=CODE_TAG, name_end=".call(", end=_END)
        )
        self.triggers = self.marks = frozenset({CODE_TAG})

    def read(self) -> Wait[bool]:
        """See `CallSyntax`."""
        if not (yield from self._cursor.follows(CODE_TAG)):
            return False
        if (yield from self._by_name.read()):
            return True
        tool = next((name for name in _TOOLS if name in self._tools), None)
        if tool is None:
            return False
        self._cursor.take(len(CODE_TAG))
        yield from self._cursor.space(MOST_SPACE)
        self._writer.begin_call(tool, None)
        yield from self._arguments(tool)
        yield from self._cursor.accept(_END)
        self._writer.end_call(self._cursor.place)
        return True

    def _arguments(self, tool: str) -> Wait[None]:
        keys = self._tools.keys(tool)
        self._cursor.mark()
        if (yield from self._is_object(keys)):
            yield from json_value(self._cursor, self._writer.arguments)
            return
        key = json.dumps(keys[0] if keys else "code", ensure_ascii=False)
        self._writer.arguments(f'{{{key}: "')
        space = ""

        def emit(text: str) -> None:
            nonlocal space
            shown = text.rstrip()
            if shown:
                self._writer.quoted(space + shown)
            space = text[len(shown) :] if shown else space + text

        yield from self._cursor.until(_ENDS, emit, keeps_half=False)
        if not self._cursor.cut:
            self._writer.arguments('"}')

    def _is_object(self, keys: tuple[str, ...]) -> Wait[bool]:
        """Returns True if a JSON object of the tool's arguments follows; reads nothing."""
        found = False
        if (yield from self._cursor.accept("{")):
            yield from self._cursor.space(MOST_SPACE)
            for key in keys:
                found = found or (yield from self._cursor.follows(json.dumps(key, ensure_ascii=False)))
        self._cursor.back()
        return found
