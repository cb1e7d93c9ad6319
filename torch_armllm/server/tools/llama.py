"""Tool parser of Llama models: the whole output is one or more ``{"name": …, "parameters": …}``."""

from __future__ import annotations

from torch_armllm.server.tools.held_text import HeldText
from torch_armllm.server.tools.parser import CallBuilder, OutputDelta, parse_call, parse_json_values

TAG = "<|python_tag|>"


class LlamaToolParser:
    """A `ToolParser` that holds back an output that begins with a brace or the tag until its end."""

    def __init__(self) -> None:
        self._held = HeldText()
        self._begin = ""  # the first characters, until they tell what the text is
        self._known = False
        self._plain = False

    def feed(self, text: str) -> OutputDelta:
        """See `ToolParser`."""
        if self._plain:
            return OutputDelta(text)
        self._held.add(text)
        if self._known:
            return OutputDelta()
        self._begin = (self._begin + text).lstrip()
        if not self._begin or (TAG.startswith(self._begin) and self._begin != TAG):
            return OutputDelta()
        self._known = True
        if self._begin.startswith(("{", TAG)):
            return OutputDelta()
        self._plain = True
        return OutputDelta(self._held.take())

    def finish(self) -> OutputDelta:
        """See `ToolParser`."""
        if self._plain:
            return OutputDelta()
        text = self._held.take()
        builder = CallBuilder()
        try:
            values = list(parse_json_values(text.strip().removeprefix(TAG)))
        except ValueError:
            return OutputDelta(text)
        calls = [call for call in map(parse_call, values) if call is not None]
        if not calls or len(calls) < len(values):
            return OutputDelta(text)
        return OutputDelta(calls=[builder.build(*call) for call in calls])
