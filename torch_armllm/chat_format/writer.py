"""Collects the parts of a message while it is parsed."""

from __future__ import annotations

import json

from torch_armllm.chat_format.deltas import OutputDelta, ToolCallDelta, new_call_id


class _Text:
    """A part's text: white space at its beginning and before what follows it belongs to neither."""

    def __init__(self) -> None:
        self.blank = False  # white space is dropped until text comes
        self.spaces: list[str] = []

    def add(self, text: str) -> str:
        """Returns the text that is certain to be shown."""
        if self.blank:
            text = text.lstrip()
        shown = text.rstrip()
        pieces: list[str] = []
        if shown:
            self.blank = False
            pieces = [*self.spaces, shown]
            self.spaces.clear()
        if len(shown) < len(text):
            self.spaces.append(text[len(shown) :])
        return "".join(pieces)

    def rest(self) -> str:
        text = "".join(self.spaces)
        self.spaces.clear()
        return text


class Writer:
    """Collects reasoning, content and calls; can hold them back until they are certain.

    Args:
        reasoning_is_content: True if reasoning and its tags stay in the content.
        continued: True if the first white space counts.

    Attributes:
        first_call_end: characters up to the end of the first call; None before.
    """

    def __init__(self, reasoning_is_content: bool = False, continued: bool = False) -> None:
        self.reasoning_is_content = reasoning_is_content
        self.num_calls = 0
        self.first_call_end: int | None = None
        self._parts: list[tuple[str, str | ToolCallDelta]] = []
        self._held: int | None = None
        self._content, self._reasoning = _Text(), _Text()
        self._reasoning.blank = not continued
        self._has_content = self._has_reasoning = False
        self._calls_before = 0
        self._had_content = False

    def content(self, text: str) -> None:
        """Adds content."""
        if shown := self._content.add(text):
            self._has_content = True
            self._parts.append(("content", shown))

    def reasoning(self, text: str) -> None:
        """Adds reasoning."""
        if self.reasoning_is_content:
            self.content(text)
        elif shown := self._reasoning.add(text):
            self._has_reasoning = True
            self._parts.append(("reasoning", shown))

    def tag(self, text: str) -> None:
        """Adds a tag of reasoning, which is shown only where reasoning is content."""
        if self.reasoning_is_content:
            self.content(text)

    def end_reasoning(self) -> None:
        """Ends the reasoning: white space around it belongs to no part."""
        if not self.reasoning_is_content:
            self._reasoning.blank = not self._has_reasoning
            self.trim()

    def begins_line(self) -> bool:
        """True if what follows begins the content or a line of it."""
        return not self._has_content or any("\n" in space for space in self._content.spaces)

    @property
    def has_content(self) -> bool:
        """True if there is content that is not white space."""
        return self._has_content

    def trim(self) -> None:
        """Drops white space at this place if no content is before it."""
        if not self._has_content:
            self._content.spaces.clear()
            self._content.blank = True

    def begin_call(self, name: str, call_id: str | None) -> None:
        """Begins a call of a tool."""
        self.trim()
        delta = ToolCallDelta(self.num_calls, "", name, call_id or new_call_id())
        self._parts.append(("call", delta))
        self.num_calls += 1

    def end_call(self, place: int) -> None:
        """Ends a call, of which nothing follows.

        Args:
            place: number of characters before its end.
        """
        if self.num_calls and self.first_call_end is None:
            self.first_call_end = place

    @property
    def is_holding(self) -> bool:
        """True while parts are held back."""
        return self._held is not None

    def arguments(self, text: str) -> None:
        """Adds arguments to the last call."""
        if text:
            self._parts.append(("call", ToolCallDelta(self.num_calls - 1, text)))

    def quoted(self, text: str) -> None:
        """Adds a piece of a JSON string to the last call's arguments."""
        self.arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def hold(self) -> None:
        """Holds back what follows."""
        self._held = len(self._parts)
        self._calls_before = self.num_calls
        self._had_content = self._has_content

    def release(self) -> None:
        """Adds what was held back."""
        self._held = None

    def drop(self) -> None:
        """Drops what was held back."""
        assert self._held is not None
        del self._parts[self._held :]
        self._held = None
        self.num_calls = self._calls_before
        if not self.num_calls:
            self.first_call_end = None
        self._content.spaces.clear()
        self._has_content = self._had_content

    def finish(self) -> None:
        """Ends the message: white space at the end of content is content if no call came."""
        self.release()
        if not self.num_calls and (rest := self._content.rest()):
            self._parts.append(("content", rest))

    def delta(self) -> OutputDelta:
        """Returns what was added since the last call."""
        until = len(self._parts) if self._held is None else self._held
        if not until:
            return OutputDelta()
        parts, self._parts = self._parts[:until], self._parts[until:]
        if self._held is not None:
            self._held = 0
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[list[ToolCallDelta]] = []
        for kind, part in parts:
            if isinstance(part, str):
                (content if kind == "content" else reasoning).append(part)
            elif calls and calls[-1][0].index == part.index:
                calls[-1].append(part)
            else:
                calls.append([part])
        joined = [
            ToolCallDelta(one[0].index, "".join(piece.arguments for piece in one), one[0].name, one[0].id)
            for one in calls
        ]
        return OutputDelta("".join(content), joined, "".join(reasoning))
