"""Calls written in a model's own format are read back by its parser."""

from __future__ import annotations

import json
from typing import Any

import pytest

from torch_armllm.chat_format.call_text import call_text
from torch_armllm.chat_format.call_turns import settle_calls
from torch_armllm.chat_format.format import ChatFormat
from torch_armllm.chat_format.known import CALLS
from torch_armllm.chat_format.rendering import make_parser
from torch_armllm.chat_format.template_traits import Message, TemplateTraits

WRITTEN = [name for name, calls in CALLS.items() if calls.kind in ("json", "tag_json", "python")]
ARGUMENTS: list[dict[str, Any]] = [
    {
        "path": "a \"b\" 'c'\n\\d ü ]}</x>",
        "count": -3,
        "rate": 0.5,
        "deep": {"on": True, "of": [1, None, "x"]},
    },
    {},
    {"path": ""},
]
PROPERTIES = {
    "path": {"type": "string"},
    "count": {"type": "integer"},
    "rate": {"type": "number"},
    "deep": {},
}


def assistant(arguments: list[dict[str, Any]]) -> Message:
    calls = [{"function": {"name": f"f{n}", "arguments": json.dumps(a)}} for n, a in enumerate(arguments)]
    return {"role": "assistant", "content": "I look.", "tool_calls": calls}


@pytest.mark.parametrize("name", [name for name in WRITTEN if name not in ("harmony", "functionary_v3")])
def test_calls_are_read_back(name: str) -> None:
    format = CALLS[name]
    text = call_text(format, [(f"f{n}", each) for n, each in enumerate(ARGUMENTS)])
    assert text is not None
    tools = {f"f{n}": {"type": "object", "properties": PROPERTIES} for n in range(3)}
    parser = make_parser(ChatFormat(calls=format), tools)
    deltas = [*map(parser.feed, text), parser.finish()]
    assert "".join(delta.content for delta in deltas) == ""
    found = ["", "", ""]
    for delta in deltas:
        for call in delta.calls:
            found[call.index] += call.arguments
    assert [json.loads(each) for each in found] == ARGUMENTS


def test_a_template_without_calls_shows_them_in_the_models_format() -> None:
    traits = TemplateTraits(shows_calls=False, calls=CALLS["kimi_k2"])
    warnings: list[str] = []
    first, second = settle_calls([assistant([{}, {"a": 1}]), assistant([{}])], traits, warnings)
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    calls = [
        f"<|tool_call_begin|>functions.{name}<|tool_call_argument_begin|>{text}<|tool_call_end|>"
        for name, text in (("f0:0", "{}"), ("f1:1", '{"a": 1}'), ("f0:2", "{}"))
    ]
    assert first == {"role": "assistant", "content": f"I look.\n\n{begin}{calls[0]}{calls[1]}{end}"}
    assert second["content"].endswith(f"{begin}{calls[2]}{end}") and not warnings


def test_arguments_that_no_syntax_takes_are_json() -> None:
    traits = TemplateTraits(shows_calls=False, calls=CALLS["lfm2"])
    warnings: list[str] = []
    (odd,) = settle_calls([assistant([{"no name": 1}])], traits, warnings)
    assert len(warnings) == 1 and "written as JSON" in warnings[0]
    assert odd["content"] == 'I look.\n\n{"name": "f0", "arguments": {"no name": 1}}'
    cut = assistant([{}])
    cut["tool_calls"][0]["function"]["arguments"] = '{"a": "b'
    (kept,) = settle_calls([cut], traits, [])
    assert kept["content"].endswith('"arguments": {"a": "b}')
