"""Responses: conversations as items, and the order of a stream's events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI
from pydantic import BaseModel

from tests.support.server_live import NAME, Live, live, scripted
from torch_armllm.llm.async_llm import AsyncLLM
from torch_armllm.server.protocol.responses import NamedTool, ResponsesRequest
from torch_armllm.server.responses_tools import tools_and_choice

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}({{ m.reasoning or '' }})={{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }}:{{ c.function.name }}{{ c.function.arguments | tojson }}]"
    "{% endfor %}{{ m.tool_call_id or '' }};{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"
)
CALLS = [
    f'<tool_call>{{"name": "{name}", "arguments": {{"a": {i}}}}}</tool_call>' for i, name in enumerate("fg")
]
TOOLS: Any = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in "fg"]
TEXT_EVENTS = [
    "output_item.added",
    "content_part.added",
    "{}.delta",
    "{}.done",
    "content_part.done",
    "output_item.done",
]


@pytest.fixture(scope="module")
def thinking(tiny_llm: AsyncLLM) -> Iterator[Live]:
    with live(tiny_llm, model={"chat_template": TEMPLATE, "tool_parser": "hermes"}) as server:
        yield server


def client_of(server: Live) -> OpenAI:
    return OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0, timeout=30)


def test_generated_text_is_that_of_the_chat_route(server: Live) -> None:
    client = client_of(server)
    asked: Any = {"model": NAME, "temperature": 0, "top_p": 0.5}
    chat = client.chat.completions.create(messages=[{"role": "user", "content": "hi"}], max_tokens=7, **asked)
    got = client.responses.create(input="hi", max_output_tokens=7, **asked)
    assert got.output_text == chat.choices[0].message.content != ""
    assert (got.status, got.object, got.store if hasattr(got, "store") else False) == (
        "incomplete",
        "response",
        False,
    )
    assert got.incomplete_details and got.incomplete_details.reason == "max_output_tokens"
    assert (got.temperature, got.top_p, got.max_output_tokens, got.error) == (0, 0.5, 7, None)
    assert got.usage and chat.usage
    assert (got.usage.input_tokens, got.usage.output_tokens) == (chat.usage.prompt_tokens, 7)
    counted = client.responses.input_tokens.count(model=NAME, input="hi")
    assert counted.input_tokens == got.usage.input_tokens
    longer = client.responses.input_tokens.count(model=NAME, input="hi", instructions="Be brief.")
    assert longer.input_tokens > counted.input_tokens and longer.object == "response.input_tokens"
    with client.responses.stream(input="hi", max_output_tokens=7, **asked) as stream:
        events = list(stream)
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == got.output_text
    assert events[-1].type == "response.incomplete"


def test_cut_streams_end_as_openais_do(server: Live) -> None:
    """The last event of a cut answer is `response.incomplete`, which holds all of the response."""
    client = client_of(server)
    asked: Any = {"model": NAME, "input": "hi", "temperature": 0, "max_output_tokens": 7}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        # OpenAI's own server ends a cut stream with this event and no `response.completed`.  `openai` 3.57
        # keeps the response of `response.completed` alone (openai/openai-python#3538), so that its
        # `get_final_response` raises for every server that keeps to the protocol.
        with suppress(RuntimeError):
            assert stream.get_final_response().status == "incomplete"
    assert [event.type for event in events if event.type == "response.completed"] == []
    last: Any = events[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert last.response.output_text == whole.output_text != ""
    assert [item.status for item in last.response.output] == ["incomplete"]
    assert last.response.usage == whole.usage


def test_items_become_messages(thinking: Live) -> None:
    items: Any = [
        {"role": "developer", "content": [{"type": "input_text", "text": "dev"}]},
        {"type": "message", "role": "user", "content": "ask"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "one moment"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "yes"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "no"}]},
    ]
    with scripted(thinking, "x") as asked:
        client_of(thinking).responses.create(model=NAME, input=items, instructions="be kind")
    assert asked[0][0]["prompt"] == (
        'system()=be kind;system()=dev;user()=ask;assistant(hm)=one moment[c1:f{"a": 1}][c2:g{}];'
        "tool()=yesc1;tool()=noc2;<think>"
    )


@pytest.mark.parametrize("size", [1, 6, 1000])
def test_events_come_in_the_official_order(thinking: Live, size: int) -> None:
    text = f"thought</think>\n\nanswer\n{CALLS[0]}\n{CALLS[1]}"
    client = client_of(thinking)
    asked: Any = {"model": NAME, "input": "hi", "tools": TOOLS}
    with scripted(thinking, text, size):
        raw = list(client.responses.create(**asked, stream=True))
        with client.responses.stream(**asked) as stream:
            final = stream.get_final_response()
        whole = client.responses.create(**asked)
    assert [event.sequence_number for event in raw] == list(range(len(raw)))
    kinds = [event.type.removeprefix("response.") for event in raw]
    merged = [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]
    call = ["output_item.added", "{}.delta", "{}.done", "output_item.done"]
    assert merged == [
        *("created", "in_progress"),
        *(kind.format("reasoning_text") for kind in TEXT_EVENTS),
        *(kind.format("output_text") for kind in TEXT_EVENTS),
        *(kind.format("function_call_arguments") for kind in 2 * call),
        "completed",
    ]
    for kind, index, want in (("reasoning_text", 0, "thought"), ("output_text", 1, "answer")):
        own: Any = [event for event in raw if event.type.startswith(f"response.{kind}")]
        assert {event.output_index for event in own} == {index}
        assert "".join(event.delta for event in own[:-1]) == own[-1].text == want
        assert len(own) > 2 or size > 1
    done: Any = [event.item for event in raw if event.type == "response.output_item.done"]
    added: Any = [event.item for event in raw if event.type == "response.output_item.added"]
    assert [item.id for item in done] == [item.id for item in added]
    assert {item.status for item in added} == {"in_progress"}
    end: Any = raw[-1]
    assert end.response.output == done
    for response in (end.response, final, whole):
        reasoning, message, *calls = response.output
        assert (reasoning.content[0].text, message.content[0].text) == ("thought", "answer")
        assert [(c.name, json.loads(c.arguments), c.status) for c in calls] == [
            ("f", {"a": 0}, "completed"),
            ("g", {"a": 1}, "completed"),
        ]
        assert len({c.call_id for c in calls}) == 2
        assert response.status == "completed"
        assert response.usage.output_tokens == len(text)
        assert response.usage.output_tokens_details.reasoning_tokens == len("thought</think>")


def test_raw_stream(thinking: Live) -> None:
    """Events have names, and none follows the last."""
    with scripted(thinking, "a</think>b"):
        got = httpx.post(f"{thinking.base}/v1/responses", json={"input": "hi", "stream": True})
        hidden = httpx.post(
            f"{thinking.base}/v1/responses", json={"input": "hi", "include_reasoning": False}
        ).json()
    events = [event.split("\n") for event in got.text.strip().split("\n\n")]
    for name, data in events:
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]
    assert events[-1][0] == "event: response.completed"
    assert [item["type"] for item in hidden["output"]] == ["message"]


FILES: Any = {
    "type": "namespace",
    "name": "files",
    "description": "Files of the project.",
    "tools": [
        {"type": "function", "name": "read", "description": "Reads.", "parameters": {"type": "object"}},
        {"type": "custom", "name": "write"},
    ],
}


def test_tools_of_namespaces(thinking: Live) -> None:
    """The model knows a tool by one name; calls, the history and choices have the namespace beside it."""
    said = "</think>" + "".join(
        f'<tool_call>{{"name": "files__{name}", "arguments": {{"input": "a"}}}}</tool_call>'
        for name in ("read", "write")
    )
    items = [
        {"role": "user", "content": "ask"},
        {"type": "function_call", "call_id": "c1", "namespace": "files", "name": "read", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "text"},
    ]
    body = {"model": NAME, "input": items, "tools": [*TOOLS, FILES]}
    with scripted(thinking, said) as asked:
        got = httpx.post(f"{thinking.base}/v1/responses", json=body).json()
        named = {"type": "function", "name": "read", "namespace": "files"}
        chosen = httpx.post(f"{thinking.base}/v1/responses", json={**body, "tool_choice": named})
    assert "[c1:files__read{}]" in asked[0][0]["prompt"]
    function, custom = got["output"]
    assert (function["type"], function["namespace"], function["name"]) == ("function_call", "files", "read")
    assert (custom["type"], custom["namespace"], custom["name"]) == ("custom_tool_call", "files", "write")
    assert (json.loads(function["arguments"]), custom["input"]) == ({"input": "a"}, "a")
    assert got["tools"][2]["name"] == "files"
    assert chosen.status_code == 200, chosen.text


def test_a_namespace_is_described_once() -> None:
    body = ResponsesRequest(input="ask", tools=[*TOOLS, FILES])
    tools, _ = tools_and_choice(body)
    told = {tool.function.name: tool.function.description for tool in tools or []}
    assert told["files__read"] == "Reads.\n\nAbout files: Files of the project."
    assert "About" not in (told["files__write"] or "")
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "files"}]}
    chosen = NamedTool.model_validate(allowed)
    tools, choice = tools_and_choice(body.model_copy(update={"tool_choice": chosen}))
    assert [tool.function.name for tool in tools or []] == ["files__read", "files__write"]
    assert choice == "required"


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ([FILES, FILES], "rename one of them"),
        ([FILES, {"type": "function", "name": "files__read"}], "rename one of them"),
        ([TOOLS[0], TOOLS[0]], "two tools are 'f'"),
        ([{**FILES, "tools": [{"type": "web_search"}]}], "not 'web_search'"),
        ([{**FILES, "tools": [{"type": "function"}]}], "needs a name"),
        ([{"type": "namespace", "tools": FILES["tools"]}], "needs a name"),
    ],
)
def test_tools_that_cannot_be_told_apart(thinking: Live, tools: Any, said: str) -> None:
    with pytest.raises(BadRequestError, match=said):
        client_of(thinking).responses.create(model=NAME, input="hi", tools=tools)


def test_parallel_calls_can_be_turned_off(thinking: Live) -> None:
    with scripted(thinking, "</think>" + "".join(CALLS)):
        got = client_of(thinking).responses.create(
            model=NAME, input="hi", tools=TOOLS, parallel_tool_calls=False
        )
    assert [getattr(item, "name", None) for item in got.output] == ["f"]
    assert got.parallel_tool_calls is False


def test_structured_text_and_chosen_tools(thinking: Live, server: Live) -> None:
    pytest.importorskip("llguidance", reason="needs the extra structured")

    class City(BaseModel):
        name: str

    client = client_of(thinking)
    with scripted(thinking, '</think>{"name": "Rome"}') as asked:
        got = client.responses.parse(model=NAME, input="hi", text_format=City)
        assert got.output_parsed == City(name="Rome")
        schema: Any = asked[0][1].structured_outputs.json
        assert schema["properties"].keys() == {"name"}
        chosen = client.responses.create(
            model=NAME, input="hi", tools=TOOLS, tool_choice={"type": "function", "name": "g"}
        )
    (call,) = chosen.output
    assert (call.type, getattr(call, "name", "")) == ("function_call", "g")
    real = client_of(server).responses.create(
        model=NAME,
        input="hi",
        max_output_tokens=60,
        text={"format": {"type": "json_schema", "name": "a", "schema": {"enum": ["Rome"]}, "strict": True}},
    )
    assert (json.loads(real.output_text), real.status) == ("Rome", "completed")


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("store", {"store": True}),
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("conversation", {"conversation": "conv_1"}),
        ("background", {"background": True}),
        ("truncation", {"truncation": "auto"}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("tools.0.type", {"tools": [{"type": "web_search"}]}),
        ("tools.0.name", {"tools": [{"type": "function"}]}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "web_search"}}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "name": "h"}}),
        ("input.0.type", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
        ("input.0.content", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        ("input.0.role", {"input": [{"content": "a"}]}),
        ("input.0", {"input": [{"type": "function_call", "name": "f"}]}),
        ("input.0", {"input": [{"type": "function_call_output", "output": "a"}]}),
        ("input", {"input": [{"type": "reasoning", "content": []}]}),
        ("text.format.type", {"text": {"format": {"type": "xml"}}}),
        ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "a"}}}),
        ("max_output_tokens", {"max_output_tokens": 0}),
    ],
)
def test_bad_requests_name_the_field(server: Live, field: str, more: dict[str, Any]) -> None:
    for stream in (False, True):
        body = {"input": "hi", "stream": stream, **more}
        got = httpx.post(f"{server.base}/v1/responses", json=body)
        error = got.json()["error"]
        assert (got.status_code, error["param"], bool(error["message"])) == (400, field, True), got.text
    if field == "store":
        with pytest.raises(BadRequestError, match="not stored on this server"):
            client_of(server).responses.create(model=NAME, input="hi", store=True)


def test_errors_within_a_stream(thinking: Live) -> None:
    from torch_armllm.server.errors import ApiError

    with scripted(thinking, "a</think>b"):
        generate = thinking.served.generate

        async def failing(*arguments: Any) -> Any:
            async for output in generate(*arguments):
                yield output
                raise ApiError(504, "too slow", code="timeout")

        thinking.served.generate = failing  # type: ignore[method-assign]
        got = httpx.post(f"{thinking.base}/v1/responses", json={"input": "hi", "stream": True})
    name, data = got.text.strip().split("\n\n")[-1].split("\n")
    assert name == "event: error"
    told = json.loads(data.removeprefix("data: "))
    assert (told["type"], told["message"], told["code"]) == ("error", "too slow", "timeout")
