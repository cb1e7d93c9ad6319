"""Parsers of forced calls: a time that is linear in what they hold back."""

from __future__ import annotations

import json

import pytest

from torch_armllm.server.tools.braces import Braces
from torch_armllm.server.tools.forced import RequiredToolParser
from torch_armllm.server.tools.held_text import HeldText

COUNT = 3000
_NESTED = '[{"name": "f", "parameters": {"a": [' + '{"b": "}"}, ' * (COUNT // 10) + "1]}}]"
HELD = [
    _NESTED,
    '[{"name": "f", "parameters": {"a": "' + "}" * COUNT,
    '[{"a": 1}' + ', {"a": 1}' * (COUNT // 10),
]


@pytest.mark.parametrize("text", HELD)
def test_what_is_held_back_is_read_once(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each character comes once, is joined with others a few times at most, and no text grows beside it."""
    joined = 0
    take = HeldText.take

    def counted(self: HeldText) -> str:
        nonlocal joined
        whole = take(self)
        joined += len(whole)
        return whole

    monkeypatch.setattr(HeldText, "take", counted)
    parser = RequiredToolParser()
    for character in text:
        parser.feed(character)
        growing = [value for value in vars(parser).values() if isinstance(value, str)]
        assert sum(map(len, growing)) < 60
    parser.finish()
    assert joined <= 4 * len(text)


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
