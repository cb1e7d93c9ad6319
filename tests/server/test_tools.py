"""Tool calls: parsing of generated calls in pieces of any size, and required calls."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI

from tests.support.server_live import NAME, Live, live, scripted
from torch_armllm.chat_format.aliases import TOOL_PARSERS
from torch_armllm.chat_format.deltas import OutputDelta, OutputParser, ToolCallDelta
from torch_armllm.chat_format.format import ChatFormat
from torch_armllm.chat_format.parser import FormatParser
from torch_armllm.llm.async_llm import AsyncLLM

CALLS = {
    "hermes": [
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": "é<x>"}}\n</tool_call>',
        'Let me see.<tool_call>{"name": "f", "arguments": {"a": "é<x>"}}',  # the end marker is missing
    ],
    "mistral": [
        'Let me see.[TOOL_CALLS] [{"name": "f", "arguments": {"a": "é<x>"}}]',
        'Let me see.[TOOL_CALLS]f{"a": "é<x>"}',
        'Let me see.[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": "é<x>"}',
    ],
    "llama": [
        '{"name": "f", "parameters": {"a": "é<x>"}}',
        '<|python_tag|>{"name": "f", "parameters": {"a": "é<x>"}}',
        '\n{"type": "function", "name": "f", "parameters": {"a": "é<x>"}}\n',
    ],
}
TWO = {
    "hermes": '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>'
    '{"name": "g", "arguments": "{}"}</tool_call>\n',
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]',
    "llama": '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
}
NO_CALLS = {
    "hermes": [
        "plain < text <tool",
        "<tool_call>nonsense</tool_call> more",
        "a \n b\n",
        '<tool_call>{"a": 1}',
        "  \n",
    ],
    "mistral": ["plain [TOOL", "[TOOL_CALLS] nonsense", "[TOOL_CALLS] [1]", ""],
    "llama": ["plain {", '{"a": 1}', "{nonsense", '{"name": 7}', " <|pyth", '{"name": "h"} and more'],
}


def parse(parser: OutputParser, text: str, size: int) -> tuple[str, list[ToolCallDelta]]:
    deltas = [parser.feed(text[at : at + size]) for at in range(0, len(text), size)]
    deltas.append(parser.finish())
    whole = OutputDelta()
    for delta in deltas:
        whole = whole.joined(delta)
    return whole.content, whole.calls


def parser_named(name: str) -> OutputParser:
    return FormatParser(ChatFormat(calls=TOOL_PARSERS[name]), {"f": None, "g": None})


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(("name", "text"), [(n, t) for n, texts in CALLS.items() for t in texts])
def test_one_call(name: str, text: str, size: int) -> None:
    content, (call,) = parse(parser_named(name), text, size)
    assert content.strip() == ("" if name == "llama" else "Let me see.")
    assert (call.name, call.index, json.loads(call.arguments)) == ("f", 0, {"a": "é<x>"})
    assert call.id == "abc" if "CALL_ID" in text else len(call.id or "") == 9


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", list(TWO))
def test_two_calls(name: str, size: int) -> None:
    content, calls = parse(parser_named(name), TWO[name], size)
    assert content == ""
    assert [(call.index, call.name, call.arguments) for call in calls] == [(0, "f", "{}"), (1, "g", "{}")]
    assert calls[0].id != calls[1].id


@pytest.mark.parametrize("size", [1, 2, 1000])
@pytest.mark.parametrize(("name", "text"), [(n, t) for n, texts in NO_CALLS.items() for t in texts])
def test_malformed_calls_become_content(name: str, text: str, size: int) -> None:
    assert parse(parser_named(name), text, size) == (text, [])


def test_content_streams_without_delay() -> None:
    assert parser_named("hermes").feed("a < b") == OutputDelta("a < b")
    assert parser_named("hermes").feed("a <tool") == OutputDelta("a")
    assert parser_named("llama").feed("hello") == OutputDelta("hello")


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "tells the weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "day": {"type": "integer", "maximum": 7}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
ASK: Any = [{"role": "user", "content": "the weather in Rome?"}]


@pytest.fixture
def client(server: Live) -> OpenAI:
    pytest.importorskip("llguidance", reason="demanded calls need the extra structured")
    return OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0, timeout=30)


def test_a_format_that_is_not_known_is_said(tiny_llm: AsyncLLM, caplog: pytest.LogCaptureFixture) -> None:
    """A template without calls: a warning, no tools in the model's card, and 400 for requests with them."""
    body: Any = {"model": NAME, "messages": ASK, "max_tokens": 1}
    with live(tiny_llm, model={"chat_template": "{{ messages[-1].content }}"}) as server:
        assert "renders no tool calls" in caplog.text
        assert httpx.get(f"{server.base}/v1/models").json()["data"][0]["tools"] is False
        for tools, status in (([WEATHER], 400), (None, 200)):
            got = httpx.post(f"{server.base}/v1/chat/completions", json={**body, "tools": tools}, timeout=60)
            assert got.status_code == status
            assert tools is None or got.json()["error"]["code"] == "unknown_tool_format"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_required_calls(client: OpenAI, choice: Any, streamed: bool) -> None:
    """A random model calls, because the schema constrains its output."""
    named = choice != "required"
    asked: Any = {
        "model": NAME,
        "messages": ASK,
        "tools": [WEATHER, CLOCK] if named else [WEATHER],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 300,
        "temperature": 0,
    }
    if streamed:
        chunks = [c.choices[0] for c in client.chat.completions.create(**asked, stream=True)]
        pieces = [call for c in chunks for call in c.delta.tool_calls or []]
        assert {piece.index for piece in pieces} == {0}
        begins = [piece for piece in pieces if piece.function and piece.function.name]
        assert begins == pieces[:1]
        assert pieces[0].id and pieces[0].function and pieces[0].function.name == "weather"
        arguments = "".join(piece.function.arguments or "" for piece in pieces if piece.function)
        assert not "".join(c.delta.content or "" for c in chunks)
        reason = chunks[-1].finish_reason
    else:
        (got,) = client.chat.completions.create(**asked).choices
        assert got.message.tool_calls is not None
        (call,) = got.message.tool_calls
        assert call.type == "function"
        assert got.message.content is None
        assert call.function.name == "weather"
        arguments, reason = call.function.arguments, got.finish_reason
    assert json.loads(arguments)["city"] in ("Rome", "Oslo")
    assert reason == ("stop" if named else "tool_calls")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("choice", "tokens"),
    [("required", 3), ("required", 51), ({"type": "function", "function": {"name": "weather"}}, 3)],
)
def test_a_forced_call_that_the_limit_cuts(client: OpenAI, choice: Any, tokens: int, streamed: bool) -> None:
    """It is a call with the arguments so far, and the finish reason says that it was cut."""
    asked: Any = {"model": NAME, "messages": ASK, "tools": [WEATHER], "tool_choice": choice}
    asked |= {"max_tokens": tokens, "temperature": 0}
    if streamed:
        chunks = [c.choices[0] for c in client.chat.completions.create(**asked, stream=True)]
        assert not any(c.delta.content for c in chunks)
        pieces = [piece.function for c in chunks for piece in c.delta.tool_calls or []]
        name = "".join(piece.name or "" for piece in pieces)
        arguments = "".join(piece.arguments or "" for piece in pieces)
        reason = chunks[-1].finish_reason
    else:
        (got,) = client.chat.completions.create(**asked).choices
        assert got.message.content is None
        (call,) = got.message.tool_calls or []
        name, arguments, reason = call.function.name, call.function.arguments, got.finish_reason
    assert (name, reason) == ("weather", "length")
    assert '{"city":"'.startswith(arguments.replace(" ", "")) and bool(arguments) == (tokens != 3)


def test_cut_calls_of_the_other_routes(server: Live, client: OpenAI) -> None:
    parameters = {"type": "object", "properties": {"city": {"const": "Rome"}}, "required": ["city"]}
    tool: Any = {"type": "function", "name": "weather", "parameters": parameters}
    forced: Any = {"model": NAME, "input": "hi", "tools": [tool], "tool_choice": "required"}
    forced["max_output_tokens"] = len('<tool_call>{"name": "weather", "arguments": {"city":"Ro')
    whole = client.responses.create(**forced)
    last: Any = list(client.responses.create(**forced, stream=True))[-1]
    for response in (whole, last.response):
        (item,) = response.output
        assert (response.status, item.type, item.status) == ("incomplete", "function_call", "incomplete")
        begun = item.arguments.replace(" ", "")  # there may be a space between two parts of JSON
        assert item.name == "weather" and '{"city":"Ro'.startswith(begun) and '"ci' in begun
    body: Any = {
        "model": NAME,
        "messages": ASK,
        "max_tokens": forced["max_output_tokens"],
        "tools": [{"name": "weather", "input_schema": parameters}],
        "tool_choice": {"type": "any"},
    }
    message = httpx.post(f"{server.base}/v1/messages", json=body).json()
    assert message["stop_reason"] == "max_tokens"
    (block,) = message["content"]
    assert (block["type"], block["name"]) == ("tool_use", "weather")
    assert "Rome".startswith(block["input"].get("city", ""))


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_generated_calls(client: OpenAI, streamed: bool, parallel: bool) -> None:
    text = "I look.\n" + TWO["hermes"].strip().replace('"f"', '"weather"').replace('"g"', '"clock"')
    asked: Any = {
        "model": NAME,
        "messages": ASK,
        "tools": [WEATHER, CLOCK],
        "parallel_tool_calls": parallel,
        "extra_body": {"structured_outputs": {"choice": [text]}},  # forces the model to generate it
    }
    if streamed:
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        *told, end = client.chat.completions.create(**asked, **options)
        chunks, usage = [c.choices[0] for c in told], end.usage
        content = "".join(c.delta.content or "" for c in chunks)
        calls = [call for c in chunks for call in c.delta.tool_calls or []]
        calls = [call for call in calls if call.function.name]
        assert [call.index for call in calls] == list(range(1 + parallel))
        reason = chunks[-1].finish_reason
    else:
        response = client.chat.completions.create(**asked)
        (got,), usage = response.choices, response.usage
        content, calls, reason = got.message.content, got.message.tool_calls, got.finish_reason
    assert content == "I look."
    first = text[: text.index("</tool_call>") + len("</tool_call>")]  # a token for each character
    assert usage.completion_tokens == (len(text) + 1 if parallel else len(first))
    names = [(call.function.name, call.function.arguments or "{}") for call in calls]
    assert names == [("weather", "{}"), ("clock", "{}")][: 1 + parallel]
    assert reason == "tool_calls"
    ignored = client.chat.completions.create(**asked, tool_choice="none").choices[0]
    assert (ignored.message.content, ignored.finish_reason) == (text, "stop")


def test_every_route_ends_an_output_behind_its_first_call(server: Live) -> None:
    text = 'I look.<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    function = {"type": "function", "name": "weather"}
    bodies: dict[str, Any] = {
        "chat/completions": {"messages": ASK, "tools": [WEATHER], "parallel_tool_calls": False},
        "responses": {"input": "hi", "tools": [function], "parallel_tool_calls": False},
        "messages": {
            "messages": ASK,
            "max_tokens": 500,
            "tools": [{"name": "weather", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        },
    }
    with scripted(server, f"{text}\n{text}", 4):
        got = {
            path: httpx.post(f"{server.base}/v1/{path}", json={"model": NAME, **body}).json()
            for path, body in bodies.items()
        }
    chat, response, message = got.values()
    assert chat["usage"]["completion_tokens"] == len(text)
    assert [response["usage"]["output_tokens"], message["usage"]["output_tokens"]] == [len(text)] * 2
    assert chat["choices"][0]["finish_reason"] == "tool_calls"
    assert chat["choices"][0]["message"]["content"] == "I look."
    assert [item["type"] for item in response["output"]] == ["message", "function_call"]
    assert [block["type"] for block in message["content"]] == ["text", "tool_use"]
    assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
def test_several_required_calls(client: OpenAI, server: Live, parallel: bool, streamed: bool) -> None:
    calls = [
        '<tool_call>{"name": "clock", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>',
    ]
    asked: Any = {"model": NAME, "messages": ASK, "tools": [WEATHER, CLOCK], "tool_choice": "required"}
    asked["parallel_tool_calls"] = parallel
    with scripted(server, "".join(calls), 4) as prompts:
        if streamed:
            chunks = [c.choices[0] for c in client.chat.completions.create(**asked, stream=True)]
            got = [
                [(call.index, call.function.name) for call in c.delta.tool_calls or [] if call.function.name]
                for c in chunks
            ]
            assert [each for each in got if each] == [[(0, "clock")], [(1, "weather")]][: 1 + parallel]
            assert chunks[-1].finish_reason == "tool_calls"
        else:
            (choice,) = client.chat.completions.create(**asked).choices
            names = [call.function.name for call in choice.message.tool_calls or []]
            assert names == ["clock", "weather"][: 1 + parallel]
    tag = json.dumps(prompts[0][1].structured_outputs.structural_tag)
    assert ("tags_with_separator" in tag) == parallel


def test_conversation_continues_after_a_call(client: OpenAI) -> None:
    call = {
        "id": "a" * 9,
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
    }
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a" * 9, "content": "sunny"},
    ]
    got = client.chat.completions.create(model=NAME, messages=messages, tools=[WEATHER], max_tokens=2)
    assert got.choices[0].message.role == "assistant"


def test_invalid_tool_choices(client: OpenAI) -> None:
    for wrong in ({"type": "function", "function": {"name": "nothing"}}, "sometimes"):
        with pytest.raises(BadRequestError):
            client.chat.completions.create(
                model=NAME,
                messages=ASK,
                tools=[WEATHER],
                tool_choice=wrong,  # type: ignore[call-overload]
            )


def test_structured_outputs(client: OpenAI, server: Live) -> None:
    spaces = server.served.prompts.tokenizer(" \t\n\r")["input_ids"]  # or it generates them without end
    schema = WEATHER["function"]["parameters"]
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    got = client.chat.completions.create(
        model=NAME,
        messages=ASK,
        response_format=wanted,
        max_tokens=300,
        temperature=0,
        logit_bias={str(token): -100 for token in spaces},
    )
    assert json.loads(got.choices[0].message.content or "")["city"] in ("Rome", "Oslo")
    chosen = client.chat.completions.create(
        model=NAME, messages=ASK, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert chosen.choices[0].message.content in ("yes", "no")
