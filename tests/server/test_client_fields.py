"""Fields that clients of the three protocols send: taken, or left out with a warning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.support.server_live import NAME, Live, live, scripted
from torch_armllm.llm.async_llm import AsyncLLM

TEMPLATE = (
    "{% for t in tools or [] %}<{{ t.function.name }}{{ t.function.description or '' }}>{% endfor %}"
    "{% for m in messages %}{{ m.role }}={{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }}:{{ c.function.name }}{{ c.function.arguments | tojson }}]"
    "{% endfor %}{{ m.tool_call_id or '' }};{% endfor %}{{ verbosity }}"
)
ASK = [{"role": "user", "content": "ask"}]
FUNCTIONS = [{"type": "function", "function": {"name": name}} for name in "fg"]
CUSTOM: Any = {
    "type": "custom",
    "name": "patch",
    "description": "Patches.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
HEADER = "x-armllm-warning"
OF_TODAY = {
    **{"metadata": {"a": "b"}, "prompt_cache_key": "k", "prompt_cache_retention": "24h", "user": "u"},
    **{"safety_identifier": "s", "service_tier": "auto", "store": False},
}


@pytest.fixture(scope="module")
def server(tiny_llm: AsyncLLM) -> Iterator[Live]:
    with live(tiny_llm, model={"chat_template": TEMPLATE, "tool_parser": "hermes"}) as running:
        yield running


def post(server: Live, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.base}/v1/{path}", json={"model": NAME, **body}, timeout=30)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": ASK, **OF_TODAY, "verbosity": "low", "max_completion_tokens": 1}),
        (
            "chat/completions",
            {
                "messages": ASK,
                "stream": True,
                "stream_options": {"include_usage": True, "include_obfuscation": False},
            },
        ),
        (
            "responses",
            {
                "input": "ask",
                **OF_TODAY,
                "text": {"verbosity": "low", "format": {"type": "text"}},
                "reasoning": {"effort": "low", "summary": "auto"},
                "include": ["reasoning.encrypted_content"],
                "max_tool_calls": 3,
                "stream_options": {"include_obfuscation": False},
            },
        ),
        (
            "messages",
            {"messages": ASK, "max_tokens": 1, "metadata": {"user_id": "u"}, "service_tier": "auto"},
        ),
    ],
)
def test_fields_of_today_are_taken(server: Live, path: str, body: dict[str, Any]) -> None:
    with scripted(server, "x") as asked:
        answer = post(server, path, **body)
    assert (answer.status_code, answer.headers.get(HEADER)) == (200, None), answer.text
    assert asked[0][0]["prompt"] == "user=ask;" + ("low" if "verbosity" in str(body) else "")


def test_what_is_not_done_is_said(server: Live) -> None:
    with scripted(server, "x"):
        stored = post(server, "chat/completions", messages=ASK, store=True)
        assert stored.headers[HEADER] == "store is true, but this server stores nothing"
        hosted = [{"type": "web_search"}, {"type": "function", "name": "f"}]
        left_out = post(server, "responses", input="ask", tools=hosted)
        assert left_out.status_code == 200 and "'web_search'" in left_out.headers[HEADER]


def test_refusals_are_texts(server: Live) -> None:
    parts = [{"type": "text", "text": "No."}, {"type": "refusal", "refusal": "I will not."}]
    said = [
        {"role": "assistant", "content": parts, "refusal": None, "annotations": [], "audio": None},
        {"role": "assistant", "content": None, "refusal": "Never.", "function_call": None},
    ]
    with scripted(server, "x") as asked:
        answer = post(server, "chat/completions", messages=[*ASK, *said, *ASK])
        assert HEADER not in answer.headers
    assert asked[0][0]["prompt"] == ("user=ask;assistant=No.\nI will not.;assistant=Never.;user=ask;")


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(server: Live, mode: str) -> None:
    chosen = {"mode": mode, "tools": [{"type": "function", "function": {"name": "g"}}]}
    flat = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "g"}]}
    tools = [{"type": "function", "name": name} for name in "fg"]
    with scripted(server, "x") as asked:
        for path, body in (
            (
                "chat/completions",
                {
                    "messages": ASK,
                    "tools": FUNCTIONS,
                    "tool_choice": {"type": "allowed_tools", "allowed_tools": chosen},
                },
            ),
            ("responses", {"input": "ask", "tools": tools, "tool_choice": flat}),
        ):
            answer = post(server, path, **body)
            assert (answer.status_code, answer.headers.get(HEADER)) == (200, None), answer.text
            assert asked[-1][0]["prompt"] == "<g>user=ask;"
            assert (asked[-1][1].structured_outputs is not None) == (mode == "required")
    chosen["tools"].append({"type": "function", "function": {"name": "h"}})
    wrong = post(
        server,
        "chat/completions",
        messages=ASK,
        tools=FUNCTIONS,
        tool_choice={"type": "allowed_tools", "allowed_tools": chosen},
    )
    assert wrong.status_code == 400 and "'h', which is not in tools" in wrong.json()["error"]["message"]
    flat["tools"] = []
    assert post(server, "responses", input="ask", tools=tools, tool_choice=flat).status_code == 400


def test_custom_tools_take_a_text(server: Live) -> None:
    call = '<tool_call>{"name": "patch", "arguments": {"input": "a\\nb \\"c\\""}}</tool_call>'
    text = 'a\nb "c"'
    with scripted(server, call) as asked:
        client = OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0, timeout=30)
        whole = client.responses.create(model=NAME, input="ask", tools=[CUSTOM])
        with client.responses.stream(model=NAME, input="ask", tools=[CUSTOM]) as stream:
            events = list(stream)
            streamed = stream.get_final_response()
    told = "<patchPatches.\n\nThe input has to match this grammar (lark):\nstart: /.+/>"
    assert told in asked[0][0]["prompt"]
    for response in (whole, streamed):
        (item,) = response.output
        assert (item.type, item.name, item.input) == ("custom_tool_call", "patch", text)  # type: ignore[union-attr]
    kinds = [event.type for event in events]
    order = [f"response.custom_tool_call_input.{end}" for end in ("delta", "done")]
    assert [kind for kind in kinds if "custom" in kind] == order

    items = [
        {"role": "user", "content": "ask"},
        {**whole.output[0].to_dict()},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": None},
    ]
    items[1]["call_id"] = "c1"
    with scripted(server, "x") as asked:
        answer = post(server, "responses", input=items, tools=[CUSTOM])
        assert (answer.status_code, answer.headers.get(HEADER)) == (200, None), answer.text
    arguments = json.dumps({"input": text})
    assert f"assistant=[c1:patch{arguments}];tool=donec1;" in asked[0][0]["prompt"]


def test_custom_tools_of_conversations(server: Live) -> None:
    """A call comes back as one of a custom tool, whole and in a stream, and may be sent again."""
    text = 'a\nb "c"'
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /.+/"}}
    tool: Any = {
        "type": "custom",
        "custom": {"name": "patch", "description": "Patches.", "format": grammar},
    }
    call = f'<tool_call>{{"name": "patch", "arguments": {json.dumps({"input": text})}}}</tool_call>'
    other = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    asked: Any = {"messages": ASK, "tools": [tool, FUNCTIONS[0]]}
    with scripted(server, call + other + call, 3) as prompts:
        answer = post(server, "chat/completions", **asked)
        assert (answer.status_code, answer.headers.get(HEADER)) == (200, None), answer.text
        client = OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0, timeout=30)
        chunks = list(client.chat.completions.create(model=NAME, stream=True, **asked))
    told = "<patchPatches.\n\nThe input has to match this grammar (lark):\nstart: /.+/><f>user=ask;"
    assert prompts[0][0]["prompt"] == told
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == chunks[-1].choices[0].finish_reason == "tool_calls"
    first, second, third = choice["message"]["tool_calls"]
    want = {"name": "patch", "input": text}
    assert [first["custom"], second["function"]["name"], third["custom"]] == [want, "f", want]
    assert [each["type"] for each in (first, second, third)] == ["custom", "function", "custom"]
    assert len(first["id"]) == 9
    streamed: dict[int, dict[str, Any]] = {}
    for piece in (each.to_dict() for c in chunks for each in c.choices[0].delta.tool_calls or ()):
        index: Any = piece["index"]
        if index not in streamed:
            streamed[index] = piece
        elif "custom" in piece:
            streamed[index]["custom"]["input"] += piece["custom"]["input"]  # type: ignore[index]
    assert [streamed[0]["custom"], streamed[1]["type"], streamed[2]["custom"]] == [want, "function", want]

    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [{**first, "id": "c1"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    with scripted(server, "x") as prompts:
        chosen = {"type": "custom", "custom": {"name": "patch"}}
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [chosen]}}
        for choice in ("auto", chosen, allowed):
            answer = post(server, "chat/completions", messages=messages, tools=[tool], tool_choice=choice)
            assert (answer.status_code, answer.headers.get(HEADER)) == (200, None), answer.text
    for (prompt, params), demands in zip(prompts, (False, True, False), strict=True):
        assert f"assistant=[c1:patch{json.dumps({'input': text})}];tool=donec1;" in prompt["prompt"]
        assert (params.structured_outputs is not None) == demands
    for wrong in ({"type": "custom"}, {"type": "custom", "custom": {}}):
        answer = post(server, "chat/completions", messages=ASK, tools=[wrong])
        assert answer.status_code == 400 and "custom" in answer.text


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ("", ""),
        ('{"input": "a"}', "a"),
        ('{"text": "a"}', '{"text": "a"}'),
        ('{"input": 1}', '{"input": 1}'),
        ("{", "{"),
    ],
)
def test_inputs_of_custom_tools(arguments: str, given: str) -> None:
    from torch_armllm.server.custom_tools import custom_arguments, custom_input

    assert custom_input(arguments) == given
    assert custom_input(custom_arguments(given)) == given


def test_pictures_of_results_are_the_users(server: Live) -> None:
    from torch_armllm.server.messages_input import chat_request
    from torch_armllm.server.protocol.messages import MessagesRequest

    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    content = [{"type": "text", "text": "a picture"}, {"type": "image", "source": source}]
    turn = {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": content},
            {"type": "text", "text": "so?"},
        ],
    }
    body = MessagesRequest.model_validate({"messages": [turn], "max_tokens": 1})
    result, user = chat_request(body).messages
    assert (result.role, result.content) == ("tool", "a picture")
    assert isinstance(user.content, list)
    assert [part.type for part in user.content] == ["image_url", "text"]
