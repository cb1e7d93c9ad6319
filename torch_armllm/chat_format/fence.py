"""Code fences around an answer that was to be JSON alone."""

from __future__ import annotations

import re

_BEGIN = re.compile(r"\s*```(?:json|JSON)?[ \t]*\n")
_MAY_BEGIN = re.compile(r"\s*(?:`{1,2}|```(?:j|js|jso|json|J|JS|JSO|JSON)?[ \t]*)?\Z")
_END = re.compile(r"\s*```\s*\Z")


class Fence:
    """Removes a code fence around a text while it streams."""

    def __init__(self) -> None:
        self._held = ""
        self._fenced: bool | None = None

    def feed(self, text: str) -> str:
        """Returns the text that is certain to be within the fence, or without one."""
        if self._fenced is False:
            return text
        self._held += text
        if self._fenced is None:
            if (begin := _BEGIN.match(self._held)) is not None:
                self._fenced, self._held = True, self._held[begin.end() :]
            elif _MAY_BEGIN.match(self._held) is not None:
                return ""
            else:
                self._fenced = False
                return self.finish()
        return self._take(_last_of(self._held))

    def finish(self) -> str:
        """Returns the text that was held back, without the fence."""
        text, self._held = self._held, ""
        return _END.sub("", text) if self._fenced else text

    def _take(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text


def _last_of(text: str) -> int:
    """Returns where the end of a text begins that may be the last fence."""
    rest = text.rstrip()
    ticks = rest[max(0, len(rest) - 3) :]
    count = len(ticks) - len(ticks.rstrip("`"))
    return len(rest[: len(rest) - count].rstrip())
