"""Parser that parts reasoning from the answer while a text streams."""

from __future__ import annotations

from typing import NamedTuple

from torch_armllm.engine.text.reasoning_tags import ReasoningTags
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
        self._held = ""
        self._part = "begin"  # then "reasoning" and "answer"
        self._blank = True  # the current part has no text yet

    def feed(self, text: str) -> Parts:
        """Parts the next characters."""
        self._held += text
        if self._part == "begin" and not self._begin():
            return Parts()
        reasoning = self._take_reasoning() if self._part == "reasoning" else ""
        return Parts(reasoning, self._take_answer() if self._part == "answer" else "")

    def finish(self) -> Parts:
        """Parts the characters that were held back, after the text has ended."""
        rest, self._held = self._held, ""
        if self._part == "reasoning" or (self._part == "begin" and self._opened):
            self.cut = True
            return Parts(reasoning=rest.strip() if self._blank else rest.rstrip())
        return Parts(answer=rest if self._part == "begin" else "")

    def _begin(self) -> bool:
        """Returns True once it is known with which part the text begins."""
        begin, tag = self._held.lstrip(), self._tags.begin
        if begin.startswith(tag):
            self._held = begin[len(tag) :]
        elif tag.startswith(begin):
            return False
        elif not self._opened:
            self._part, self._blank = "answer", False
            return True
        self._part = "reasoning"
        return True

    def _take_reasoning(self) -> str:
        if self._blank:
            self._held = self._held.lstrip()
        position = self._held.find(self._tags.end)
        if position >= 0:
            text, self._held = self._held[:position].rstrip(), self._held[position + len(self._tags.end) :]
            self._part, self._blank = "answer", True
            return text
        text = self._held[: len(self._held) - partial_marker_length(self._held, self._tags.end)].rstrip()
        self._held = self._held[len(text) :]
        self._blank = self._blank and not text
        return text

    def _take_answer(self) -> str:
        text, self._held = self._held.lstrip() if self._blank else self._held, ""
        self._blank = self._blank and not text
        return text
