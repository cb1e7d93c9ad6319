"""Calls of the first kind of syntax that reads them, as models mix their formats."""

from __future__ import annotations

from collections.abc import Sequence

from torch_armllm.chat_format.braces_calls import BracesCalls
from torch_armllm.chat_format.calls import CallSyntax, MarkedCalls
from torch_armllm.chat_format.code_calls import CodeCalls
from torch_armllm.chat_format.cursor import Cursor, Wait
from torch_armllm.chat_format.format import CallFormat, Kind
from torch_armllm.chat_format.json_calls import JsonCalls, TagJsonCalls
from torch_armllm.chat_format.nested_calls import NestedCalls
from torch_armllm.chat_format.python_calls import PythonCalls
from torch_armllm.chat_format.tagged_calls import TaggedCalls
from torch_armllm.chat_format.typed_values import ToolSchemas
from torch_armllm.chat_format.writer import Writer

_SYNTAXES: dict[Kind, type[MarkedCalls]] = {
    "json": JsonCalls,
    "tag_json": TagJsonCalls,
    "tagged": TaggedCalls,
    "python": PythonCalls,
    "braces": BracesCalls,
    "nested": NestedCalls,
}


_FUNCTION = CallFormat("tag_json", begin="<function=", name_end=">", end="</function>")
"""Calls of models whose own have no markers."""


class AnyCalls:
    """A `CallSyntax` that tries several in turn.

    Args:
        kinds: these, the format's own first.
    """

    def __init__(self, kinds: Sequence[CallSyntax]) -> None:
        self._kinds = kinds
        self.triggers = frozenset[str]().union(*(kind.triggers for kind in kinds))
        self.marks = frozenset[str]().union(*(kind.marks for kind in kinds))

    def read(self) -> Wait[bool]:
        """See `CallSyntax`."""
        for kind in self._kinds:
            if (yield from kind.read()):
                return True
        return False


def syntax_of(cursor: Cursor, writer: Writer, tools: ToolSchemas, format: CallFormat) -> CallSyntax:
    """Returns the syntax of a format and of what its models write besides: JSON within its tags, and code."""
    kinds: list[CallSyntax] = [_SYNTAXES[format.kind](cursor, writer, tools, format)]
    first = format.opening[0] if format.opening else ""
    if format.kind in ("tagged", "python") and first[:1] in "<[" and len(first) > 1:
        json = CallFormat("json", begin=first, end=format.end, section_end=format.section_end)
        kinds.append(JsonCalls(cursor, writer, tools, json))
    if format.kind == "json" and format.is_bare:
        kinds.append(TagJsonCalls(cursor, writer, tools, _FUNCTION))
    if format.takes_code:
        kinds.append(CodeCalls(cursor, writer, tools))
    return kinds[0] if len(kinds) == 1 else AnyCalls(kinds)
