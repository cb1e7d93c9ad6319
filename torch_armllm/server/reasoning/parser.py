"""Parser that parts reasoning from the answer while a text streams."""

from __future__ import annotations

from typing import NamedTuple

from torch_armllm.engine.text.reasoning_tags import ReasoningTags
from torch_armllm.server.tools.held_text import HeldText
from torch_armllm.server.tools.parser import partial_marker_length


class Parts(NamedTuple):
    """New reasoning and new text of the answer."""

    reasoning: str = ""
    answer: str = ""


class ReasoningParser:
    """Parts one text incrementally; whitespace around the tags belongs to neither part.

    The first tag counts only where the text begins with it, so that an answer may talk about tags.

    Args:
        tags: the tags.
        opened: True if the text begins within the reasoning.

    Attributes:
        cut: True once the text has ended within the reasoning, without an answer.
    """

    def __init__(self, tags: ReasoningTags, opened: bool) -> None:
        self.cut = False
        self._tags = tags
        self._opened = opened
        self._held = HeldText()  # white space and, at the beginning, what may be the first tag
        self._start = ""  # the first characters without white space before them
        self._rest = ""  # may be the beginning of the last tag
        self._part = "begin"  # then "reasoning" and "answer"
        self._blank = True  # the current part has no text yet

    def feed(self, text: str) -> Parts:
        """Parses the next characters."""
        if self._part == "begin":
            begun = self._begin(text)
            if begun is None:
                return Parts()
            text = begun
        reasoning = HeldText()
        if self._part == "reasoning":
            text = self._take_reasoning(text, reasoning)
        return Parts(reasoning.take(), self._take_answer(text) if self._part == "answer" else "")

    def finish(self) -> Parts:
        """Parts the characters that were held back, after the text has ended."""
        if self._part == "reasoning":
            self.cut = True
            reasoning = HeldText()
            self._add_reasoning(self._rest, reasoning)
            return Parts(reasoning=reasoning.take())
        if self._part == "begin" and self._opened:
            self.cut = True
            return Parts(reasoning=self._held.take().strip())
        return Parts(answer=self._held.take() if self._part == "begin" else "")

    def _begin(self, text: str) -> str | None:
        """Returns the text with which a part begins, or None while it is not known which one it is."""
        tag = self._tags.begin
        self._held.add(text)
        self._start = (self._start + text).lstrip()
        if tag.startswith(self._start) and self._start != tag:
            return None
        whole = self._held.take()
        if self._start.startswith(tag):
            self._part = "reasoning"
            return self._start[len(tag) :]
        self._part = "reasoning" if self._opened else "answer"
        self._blank = self._opened
        return whole

    def _take_reasoning(self, text: str, reasoning: HeldText) -> str:
        """Adds what is reasoning; returns what follows it."""
        text = self._rest + text
        end = text.find(self._tags.end)
        if end >= 0:
            self._add_reasoning(text[:end], reasoning)
            self._held.take()
            self._part, self._blank = "answer", True
            return text[end + len(self._tags.end) :]
        end = len(text) - partial_marker_length(text, self._tags.end)
        self._rest = text[end:]
        self._add_reasoning(text[:end], reasoning)
        return ""

    def _add_reasoning(self, text: str, reasoning: HeldText) -> None:
        """Adds reasoning, and holds back the white space at its end; that before it is dropped."""
        if self._blank:
            text = text.lstrip()
        if shown := text.rstrip():
            self._blank = False
            reasoning.add(self._held.take())
            reasoning.add(shown)
        self._held.add(text[len(shown) :])

    def _take_answer(self, text: str) -> str:
        if self._blank:
            text = text.lstrip()
            self._blank = not text
        return text
