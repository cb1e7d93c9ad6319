"""Tool parser of Llama models: the whole output is one or more ``{"name": …, "parameters": …}``."""

from __future__ import annotations

from torch_armllm.server.tools.parser import CallBuilder, OutputDelta, parse_call, parse_json_values

TAG = "<|python_tag|>"


class LlamaToolParser:
    """A `ToolParser` that holds back an output that begins with a brace or the tag until its end."""

    def __init__(self) -> None:
        self._text = ""
        self._plain = False

    def feed(self, text: str) -> OutputDelta:
        """See `ToolParser`."""
        if self._plain:
            return OutputDelta(text)
        self._text += text
        begin = self._text.lstrip()
        if not begin or begin.startswith(("{", TAG)) or TAG.startswith(begin):
            return OutputDelta()
        self._plain = True
        return OutputDelta(self._text)

    def finish(self) -> OutputDelta:
        """See `ToolParser`."""
        if self._plain:
            return OutputDelta()
        builder = CallBuilder()
        try:
            values = list(parse_json_values(self._text.strip().removeprefix(TAG)))
        except ValueError:
            return OutputDelta(self._text)
        calls = [call for call in map(parse_call, values) if call is not None]
        if not calls or len(calls) < len(values):
            return OutputDelta(self._text)
        return OutputDelta(calls=[builder.build(*call) for call in calls])
