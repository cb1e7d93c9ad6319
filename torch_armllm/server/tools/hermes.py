"""Calls as Hermes and Qwen models write them: ``<tool_call>{"name": …, "arguments": …}</tool_call>``."""

from __future__ import annotations

from torch_armllm.server.tools.reader import Heard, Numbering, as_call, held, json_values

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesReader:
    """See `Reader`; what stands between the marks and is no call is text.

    Spaces are held back until it is known whether a call follows, to which they belong.
    """

    def __init__(self) -> None:
        self._text = ""
        self._inside = False
        self._numbering = Numbering()
        self._called = False

    def feed(self, text: str) -> Heard:
        """See `Reader`."""
        self._text += text
        heard = Heard()
        while (place := self._text.find(END if self._inside else BEGIN)) >= 0:
            before = self._text[:place]
            self._text = self._text[place + len(END if self._inside else BEGIN) :]
            if self._inside:
                self._call(before, END, heard)
            else:
                self._say(before.rstrip(), heard)
            self._inside = not self._inside
        if not self._inside:
            certain = self._text[: len(self._text) - held(self._text, BEGIN)].rstrip()
            self._say(certain, heard)
            self._text = self._text[len(certain) :]
        return heard

    def finish(self) -> Heard:
        """See `Reader`: a model may leave the last mark out."""
        heard = Heard()
        if self._inside:
            self._call(self._text, "", heard)
        else:
            self._say(self._text.rstrip() if self._called else self._text, heard)
        self._text = ""
        return heard

    def _call(self, text: str, end: str, heard: Heard) -> None:
        try:
            found = [as_call(value) for value in json_values(text)]
        except ValueError:
            found = [None]
        calls = [call for call in found if call is not None]
        if not calls or len(calls) < len(found):
            heard.content += BEGIN + text + end
            return
        self._called = True
        heard.calls += [self._numbering.call(*call) for call in calls]

    def _say(self, text: str, heard: Heard) -> None:
        heard.content += text.lstrip() if self._called and not text.strip() else text
