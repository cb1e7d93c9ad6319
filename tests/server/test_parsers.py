"""Parsers of outputs: the same in pieces of any size, in a time that is linear in what they hold back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from torch_armllm.engine.text.reasoning_tags import REASONING_PARSERS
from torch_armllm.server.reasoning.parser import ReasoningParser
from torch_armllm.server.tools.braces import Braces
from torch_armllm.server.tools.choice import TOOL_PARSERS
from torch_armllm.server.tools.forced import RequiredToolParser
from torch_armllm.server.tools.held_text import HeldText
from torch_armllm.server.tools.mistral import MistralToolParser

COUNT = 3000
_NESTED = '[{"name": "f", "parameters": {"a": [' + '{"b": "}"}, ' * (COUNT // 10) + "1]}}]"
HELD: list[tuple[Any, str]] = [
    (TOOL_PARSERS["hermes"], "<tool_call>" + "x" * COUNT),
    (TOOL_PARSERS["hermes"], "<tool_call>" + "</tool_call" * (COUNT // 11)),
    (TOOL_PARSERS["hermes"], "a" + " " * COUNT),
    (TOOL_PARSERS["hermes"], "<tool_call></tool_call>" * (COUNT // 23)),
    (TOOL_PARSERS["llama"], "{" * COUNT),
    (TOOL_PARSERS["llama"], " " * COUNT),
    (TOOL_PARSERS["mistral"], "[TOOL_CALLS]" * (COUNT // 12)),
    (TOOL_PARSERS["mistral"], "[TOOL_CALLS]f" + " " * COUNT),
    (RequiredToolParser, _NESTED),
    (RequiredToolParser, '[{"name": "f", "parameters": {"a": "' + "}" * COUNT),
    (RequiredToolParser, '[{"a": 1}' + ', {"a": 1}' * (COUNT // 10)),
    (lambda: ReasoningParser(REASONING_PARSERS["qwen3"], True), " " * COUNT),
    (lambda: ReasoningParser(REASONING_PARSERS["qwen3"], False), " " * COUNT),
    (lambda: ReasoningParser(REASONING_PARSERS["qwen3"], True), "a" + " " * COUNT),
    (lambda: ReasoningParser(REASONING_PARSERS["qwen3"], True), "</think" * (COUNT // 7)),
]


@pytest.mark.parametrize(("make", "text"), HELD)
def test_what_is_held_back_is_read_once(make: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each character comes once, is joined with others a few times at most, and no text grows beside it."""
    joined = 0
    take = HeldText.take

    def counted(self: HeldText) -> str:
        nonlocal joined
        whole = take(self)
        joined += len(whole)
        return whole

    monkeypatch.setattr(HeldText, "take", counted)
    parser = make()
    for character in text:
        parser.feed(character)
        growing = [value for value in vars(parser).values() if isinstance(value, str)]
        assert sum(map(len, growing)) < 60
    parser.finish()
    assert joined <= 4 * len(text)


def test_spaces_behind_a_name_are_tried_in_one_way_only() -> None:
    parser = MistralToolParser()
    text = "[TOOL_CALLS]" + "f" * 50_000 + " " * 50_000  # quadratic: minutes
    parser.feed(text)
    assert parser.finish().content == text


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_ends_of_objects(size: int) -> None:
    objects = ['{"a": "}{\\"", "b": {"c": "\\\\"}}', "{}", '{"d": "\\\\\\"}"}']
    text = "[" + ", ".join(objects) + "]"
    braces, ends = Braces(), []
    for at in range(0, len(text), size):
        ends += [at + end for end in braces.ends(text[at : at + size])]
    begins = [1, *(end + 2 for end in ends[:-1])]
    assert [text[begin:end] for begin, end in zip(begins, ends, strict=True)] == objects
    for each in objects:
        json.loads(each)
