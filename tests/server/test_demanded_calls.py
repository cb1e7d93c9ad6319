"""Demanded and strict calls: a random model writes its template's format, valid by the schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from tests.chat_format.templates import SAMPLES
from tests.support.server_live import NAME, Live, live, scripted
from tests.support.tiny_server import TEMPLATE
from torch_armllm.llm.async_llm import AsyncLLM
from torch_armllm.server.middleware.warnings import HEADER

pytest.importorskip("llguidance", reason="demanded calls need the extra structured")
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "day": {"type": "integer", "minimum": 0, "maximum": 7},
        "at": {"type": "string", "maxLength": 3},
        "sunny": {"type": ["boolean", "null"]},
    },
    "required": ["city", "at"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
OTHER: Any = {"type": "function", "function": {"name": "clock", "parameters": {"properties": {}}}}
SHOWN = "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
REASONING = "{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{%- endif %}"
TEMPLATES = {"hermes": TEMPLATE} | {
    name: SHOWN + SAMPLES[name].template.replace(REASONING, "").replace("<think>", "")
    for name in ("xml", "attributes", "python", "index")
}


@pytest.fixture(scope="module", params=TEMPLATES)
def server(request: pytest.FixtureRequest, tiny_llm: AsyncLLM) -> Iterator[Live]:
    with live(tiny_llm, model={"chat_template": TEMPLATES[request.param]}) as running:
        yield running


def ask(server: Live, **more: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "the weather?"}]
    body = {"model": NAME, "messages": messages, "tools": [TOOL], "max_tokens": 300, "seed": 1, **more}
    return httpx.post(f"{server.base}/v1/chat/completions", json=body, timeout=60)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_demanded_calls_are_valid(server: Live, choice: Any) -> None:
    got = ask(server, tool_choice=choice, parallel_tool_calls=False)
    assert got.status_code == 200 and HEADER not in got.headers, got.text
    (answer,) = got.json()["choices"]
    assert answer["message"]["content"] is None and answer["finish_reason"] != "length", got.text
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


def test_several_demanded_calls(server: Live) -> None:
    """A model that is bound to call may call any of the tools, and again; the last call may be cut off."""
    got = ask(server, tool_choice="required", tools=[TOOL, OTHER], seed=3, max_tokens=400)
    (answer,) = got.json()["choices"]
    calls = answer["message"]["tool_calls"]
    assert answer["message"]["content"] is None and calls
    for call in calls if answer["finish_reason"] == "tool_calls" else calls[:-1]:
        arguments = json.loads(call["function"]["arguments"])
        assert call["function"]["name"] == "clock" or jsonschema.validate(arguments, SCHEMA) is None


@pytest.mark.parametrize("parallel", [False, True])
def test_strict_calls_are_bound_once_they_begin(server: Live, parallel: bool) -> None:
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    more: Any = {"parallel_tool_calls": parallel, "max_tokens": 5}
    with scripted(server, "x") as asked:
        got = [ask(server, tools=tools, **more) for tools in ([strict, OTHER], [TOOL])]
        formatted = {"type": "json_object"}
        got.append(ask(server, tools=[strict], response_format=formatted, **more))
    assert all(each.status_code == 200 for each in got)
    tag = asked[0][1].structured_outputs.structural_tag["format"]
    assert (tag["type"], tag["stop_after_first"]) == ("triggered_tags", not parallel)
    assert asked[1][1].structured_outputs is None and asked[2][1].structured_outputs.json_object
    assert [each.headers.get(HEADER) for each in got[:2]] == [None, None]
    assert "another constraint" in got[2].headers[HEADER]
    assert ask(server, tools=[strict], **more).json()["usage"]["completion_tokens"]  # a grammar that compiles


def test_what_no_grammar_expresses_is_json(server: Live) -> None:
    """A pattern of a text has no place outside of JSON: the model writes JSON, and a warning says so."""
    pattern = {"type": "string", "pattern": "^[xy]$"}
    schema = {"properties": {"a": pattern}, "required": ["a"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    got = ask(server, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    (call,) = got.json()["choices"][0]["message"]["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
    is_json = server.served.chat_format.format.calls.kind != "tagged"
    assert (HEADER in got.headers) != is_json
    assert is_json or "a text has pattern" in got.headers[HEADER]
    strict = {**tool, "function": {**tool["function"], "strict": True}}
    warned = ask(server, tools=[strict], max_tokens=1).headers.get(HEADER, "")
    assert ("strict tools are not enforced" in warned) != is_json
