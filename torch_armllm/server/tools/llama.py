"""Calls as Llama models write them: the whole answer is ``{"name": …, "parameters": …}``, one or several."""

from __future__ import annotations

from torch_armllm.server.tools.reader import Heard, Numbering, as_call, json_values

TAG = "<|python_tag|>"


class LlamaReader:
    """See `Reader`; an answer that begins with a brace or the tag is held back until its end."""

    def __init__(self) -> None:
        self._text = ""
        self._plain = False

    def feed(self, text: str) -> Heard:
        """See `Reader`."""
        if self._plain:
            return Heard(text)
        self._text += text
        begin = self._text.lstrip()
        if not begin or begin.startswith(("{", TAG)) or TAG.startswith(begin):
            return Heard()
        self._plain = True
        return Heard(self._text)

    def finish(self) -> Heard:
        """See `Reader`."""
        if self._plain:
            return Heard()
        numbering = Numbering()
        try:
            values = list(json_values(self._text.strip().removeprefix(TAG)))
        except ValueError:
            return Heard(self._text)
        calls = [call for call in map(as_call, values) if call is not None]
        if not calls or len(calls) < len(values):
            return Heard(self._text)
        return Heard(calls=[numbering.call(*call) for call in calls])
