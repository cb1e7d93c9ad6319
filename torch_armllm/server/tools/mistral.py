"""Calls as Mistral models write them: ``[TOOL_CALLS] [{"name": …, "arguments": …}]``, or a mark a call.

Newer models write ``[TOOL_CALLS]name{…}`` or ``[TOOL_CALLS]name[ARGS]{…}`` for each.
"""

from __future__ import annotations

import re
from typing import Any

from torch_armllm.server.tools.reader import Heard, Numbering, as_call, held, json_values

MARK = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)


class MistralReader:
    """See `Reader`; behind the first mark everything is held back until the end."""

    def __init__(self) -> None:
        self._text = ""
        self._marked = False

    def feed(self, text: str) -> Heard:
        """See `Reader`."""
        self._text += text
        if self._marked:
            return Heard()
        place = self._text.find(MARK)
        self._marked = place >= 0
        certain = place if self._marked else len(self._text) - held(self._text, MARK)
        heard = Heard(self._text[:certain])
        self._text = self._text[certain:]
        return heard

    def finish(self) -> Heard:
        """See `Reader`."""
        if not self._marked:
            return Heard(self._text)
        numbering = Numbering()
        try:
            values = [value for part in self._text.split(MARK)[1:] for value in _values(part)]
        except ValueError:
            return Heard(self._text)
        calls = [call for call in map(as_call, values) if call is not None]
        if not calls or len(calls) < len(values):
            return Heard(self._text)
        return Heard(calls=[numbering.call(*call) for call in calls])


def _values(part: str) -> list[Any]:
    """The calls of one mark."""
    if named := _NAMED.fullmatch(part):
        return [{"name": named[1], "arguments": value} for value in json_values(named[2])]
    found: list[Any] = []
    for value in json_values(part):
        found += value if isinstance(value, list) else [value]
    return found
