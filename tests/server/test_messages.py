"""Messages in Anthropic's format, and the order of a stream's events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from tests.support.server_live import NAME, Live, live, scripted
from torch_armllm.llm.async_llm import AsyncLLM

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}({{ m.reasoning or '' }})={{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }}:{{ c.function.name }}{{ c.function.arguments | tojson }}]"
    "{% endfor %}{{ m.tool_call_id or '' }};{% endfor %}"
    "{% if add_generation_prompt %}{{ 'quiet' if enable_thinking is false else '<think>' }}{% endif %}"
)
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TOOLS = [{"name": "f", "description": "does it", "input_schema": {"type": "object"}}]
ASK = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def thinking(tiny_llm: AsyncLLM) -> Iterator[Live]:
    with live(tiny_llm, model={"chat_template": TEMPLATE, "tool_parser": "hermes"}) as server:
        yield server


def post(server: Live, path: str = "/v1/messages", headers: dict[str, str] | None = None, **body: Any) -> Any:
    body = {"model": NAME, "max_tokens": 8, "messages": ASK, **body}
    return httpx.post(f"{server.base}{path}", json=body, headers=headers, timeout=60)


def events_of(server: Live, **body: Any) -> list[dict[str, Any]]:
    lines = post(server, stream=True, **body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [line[7:] for line in lines if line.startswith("event: ")] == [e["type"] for e in events]
    return events


def test_text_is_that_of_the_chat_route(server: Live) -> None:
    asked = {"temperature": 0, "top_p": 0.5, "max_tokens": 7}
    chat = post(server, "/v1/chat/completions", **asked).json()
    got = post(server, **asked).json()
    assert got["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert (got["type"], got["role"], got["model"], got["stop_reason"]) == (
        "message",
        "assistant",
        NAME,
        "max_tokens",
    )
    usage = got["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == 7
    counted = post(server, "/v1/messages/count_tokens").json()
    assert counted == {"input_tokens": chat["usage"]["prompt_tokens"]}
    events = events_of(server, **asked)
    text = "".join(e["delta"].get("text", "") for e in events if e["type"] == "content_block_delta")
    assert [{"type": "text", "text": text}] == got["content"]


def test_blocks_become_messages(thinking: Live) -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "ask"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "one moment"},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "yes"}]},
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    with scripted(thinking, "fine") as asked:
        post(thinking, messages=turns, system=[{"type": "text", "text": "be brief"}], tools=TOOLS)
        post(thinking, thinking={"type": "disabled"})
        post(thinking, messages=[*ASK, {"role": "assistant", "content": "It is"}])
    assert asked[0][0]["prompt"] == (
        'system()=be brief;user()=ask;assistant(hm)=one moment[c1:f{"a": 1}];tool()=yesc1;user()=and?;<think>'
    )
    assert asked[1][0]["prompt"].endswith(";quiet")
    assert asked[2][0]["prompt"].endswith("assistant()=It is")


def test_messages_of_the_system_stay_where_they_are(thinking: Live) -> None:
    """Claude Code puts them after results, and begins its system message with a block of its own."""
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
    late = [{"type": "text", "text": "9 are left"}]
    messages = [
        *ASK,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "yes"}]},
        {"role": "system", "content": late},
    ]
    texts = ["x-anthropic-billing-header: cc_version=2; cch=a7;", "be kind"]
    system = [{"type": "text", "text": text} for text in texts]
    with scripted(thinking, "x") as asked:
        got = post(thinking, messages=messages, system=system)
        post(thinking, messages=messages[:1] + [{"role": "system", "content": "now"}], system=system[:1])
    prompts = [prompt["prompt"] for prompt, _ in asked]
    assert prompts == [
        'system()=be kind;user()=hi;assistant()=[t1:f{"a": 1}];tool()=yest1;system()=9 are left;<think>',
        "user()=hi;system()=now;<think>",
    ]
    assert "x-anthropic-billing-header" in got.headers["X-Armllm-Warning"]


def test_stream_of_thinking_text_and_a_call(thinking: Live) -> None:
    with scripted(thinking, f"hm</think>one moment{CALL}", 3):
        events = events_of(
            thinking, tools=TOOLS, thinking={"type": "enabled", "budget_tokens": 9}, max_tokens=90
        )
        whole = post(thinking, tools=TOOLS, thinking={"type": "enabled"}, max_tokens=90).json()
        hidden = post(thinking, tools=TOOLS, max_tokens=90).json()
    order = [e["type"] for e in events]
    assert order[0] == "message_start" and order[-2:] == ["message_delta", "message_stop"]
    started = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert started == ["thinking", "text", "tool_use"]
    assert order.count("content_block_stop") == 3
    assert [block["type"] for block in whole["content"]] == started
    assert [block["type"] for block in hidden["content"]] == started[1:]
    assert whole["content"][0]["thinking"] == "hm"
    assert whole["content"][1]["text"] == "one moment"
    assert (whole["content"][2]["name"], whole["content"][2]["input"]) == ("f", {"a": 1})
    pieces = [e["delta"].get("partial_json", "") for e in events if e["type"] == "content_block_delta"]
    assert json.loads("".join(pieces)) == {"a": 1}
    assert whole["stop_reason"] == events[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "blocks of type 'document'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "an image needs source"),
        ({"tools": [{"name": "bash", "type": "bash_20250124"}]}, "tools of type 'bash_20250124'"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "needs a name"),
    ],
    ids=str,
)
def test_bad_requests_are_refused(server: Live, body: dict[str, Any], message: str) -> None:
    answer = post(server, **body)
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert message in answer.json()["error"]["message"]


def test_key_is_taken_from_anthropics_header(tiny_llm: AsyncLLM) -> None:
    with live(tiny_llm, api_keys=("k",)) as server:
        assert post(server, headers={"x-api-key": "k"}).status_code == 200
        assert post(server, headers={"x-api-key": "other"}).status_code == 401
        assert post(server).status_code == 401
        assert httpx.get(f"{server.base}/ping").status_code == 200
        assert httpx.get(f"{server.base}/load").status_code == 401


def test_load_counts_what_is_under_way(server: Live) -> None:
    assert httpx.get(f"{server.base}/load").json() == {"server_load": 0}
    with server.served.admission.admit(3):
        assert httpx.get(f"{server.base}/load").json() == {"server_load": 3}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_unknown_fields_are_named_in_a_header(server: Live, stream: bool) -> None:
    path = "/v1/chat/completions"
    mistyped = post(server, path, max_tokns=3, **{"ö": 1, "line\nbreak": 2, "": 3}, stream=stream)
    assert mistyped.status_code == 200
    assert mistyped.headers["x-armllm-warning"] == (
        "unknown fields are ignored: max_tokns (did you mean max_tokens?), '\\xf6', 'line\\nbreak', ''"
    )
    many = post(server, path, **{f"f{i}": i for i in range(20)}, stream=stream)
    assert many.headers["x-armllm-warning"].endswith("f7, and 12 more")
    assert "x-armllm-warning" not in post(server, path, temperature=0, stream=stream).headers
    refused = post(server, path, max_tokns=3, temperature="hot")
    assert refused.status_code == 400
    assert "max_tokns" in refused.headers["x-armllm-warning"]


SCHEMA = {"enum": ["Rome"]}


@pytest.mark.parametrize(
    "asked",
    [
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
    ],
    ids=["config", "older name"],
)
def test_formats_of_the_text(server: Live, asked: dict[str, Any]) -> None:
    pytest.importorskip("llguidance", reason="needs the extra structured")
    answer = post(server, **asked, max_tokens=60, temperature=0)
    assert "x-armllm-warning" not in answer.headers
    (block,) = answer.json()["content"]
    assert (json.loads(block["text"]), answer.json()["stop_reason"]) == ("Rome", "end_turn")
    assert post(server, "/v1/messages/count_tokens", **asked).status_code == 200


def test_formats_that_are_refused(server: Live) -> None:
    for asked, field in (
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"output_format": {"type": "xml", "schema": SCHEMA}}, "output_format"),
    ):
        answer = post(server, **asked)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_anthropics_client_parses(thinking: Live) -> None:
    anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")

    class City(BaseModel):
        name: str

    client = anthropic.Anthropic(base_url=thinking.base, api_key="none", max_retries=0)
    with scripted(thinking, '</think>{"name": "Rome"}') as asked:
        got = client.messages.parse(model=NAME, max_tokens=60, messages=ASK, output_format=City)
    assert got.parsed_output == City(name="Rome")
    assert asked[0][1].structured_outputs.json["properties"].keys() == {"name"}


def test_effort_is_a_variable_of_the_template(tiny_llm: AsyncLLM) -> None:
    template = "{{ reasoning_effort }}{{ enable_thinking }}"
    with live(tiny_llm, model={"chat_template": template}) as server, scripted(server, "x") as asked:
        post(server, output_config={"effort": "low"})
        post(server, output_config={"effort": "low"}, thinking={"type": "disabled"})
    assert [prompt["prompt"] for prompt, _ in asked] == ["low", "noneFalse"]


def test_nested_unknown_fields_are_named_with_their_path(server: Live) -> None:
    """Fields that have no value, or come back from an answer, are none of them."""
    block = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}, "citations": None}
    turns = [{"role": "user", "content": [block, {**block, "txt": "a"}, {**block, "txt": "b"}]}]
    answer = post(server, messages=turns)
    assert answer.headers["x-armllm-warning"] == (
        "unknown fields are ignored: messages.content.txt (did you mean text?)"
    )
    more = {"response_format": {"type": "text", "schemas": {}, "json_schma": 1}, "reasoning": {}}
    answer = post(server, "/v1/chat/completions", **more)
    assert answer.headers["x-armllm-warning"] == (
        "unknown fields are ignored: response_format.json_schma (did you mean json_schema?)"
    )
    nested = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "a", "ö": 1}]}
    answer = post(server, messages=[{"role": "user", "content": [nested]}])
    assert answer.headers["x-armllm-warning"].endswith(": messages.content.content.'\\xf6'")
