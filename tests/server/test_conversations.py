"""Conversations that a template does not take as they are: its form, and a header that warns."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.server_live import NAME, Live, live, scripted
from torch_armllm.llm.async_llm import AsyncLLM

NO_SYSTEM = (
    "{% for m in messages if m.role != 'system' %}{{ m.role }}={{ m.content }}"
    "{% if enable_thinking %}!{% endif %};{% endfor %}{% if add_generation_prompt %}assistant={% endif %}"
)
NO_THOUGHTS = (
    "{% for m in messages %}{{ m.role }}={{ m.content.split('</think>')[-1] }};{% endfor %}"
    "{% if add_generation_prompt %}assistant=<think>{% endif %}"
)
ASK = {"role": "user", "content": "ask"}
HEADER = "x-armllm-warning"


def post(server: Live, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
    return httpx.post(server.base + path, json={"model": NAME, **body}, timeout=30)


@pytest.mark.parametrize("stream", [False, True])
def test_a_system_that_is_not_shown_is_given_to_the_user_with_a_warning(
    tiny_llm: AsyncLLM, stream: bool
) -> None:
    with live(tiny_llm, model={"chat_template": NO_SYSTEM}) as server, scripted(server, "x") as asked:
        system = {"role": "system", "content": "sys"}
        for role in ("system", "developer"):
            answer = post(server, messages=[{**system, "role": role}, ASK], max_tokens=1, stream=stream)
            assert answer.headers[HEADER].startswith("the chat template shows no system message")
        also = post(server, messages=[system, ASK], max_tokens=1, mistyped=1, stream=stream)
        assert "; unknown fields are ignored: mistyped" in also.headers[HEADER]
        assert HEADER not in post(server, messages=[ASK], max_tokens=1, stream=stream).headers
        responses = post(server, "/v1/responses", input="ask", instructions="sys", stream=stream)
        messages = post(server, "/v1/messages", messages=[ASK], system="sys", max_tokens=1, stream=stream)
        assert responses.headers[HEADER] == messages.headers[HEADER]
        assert {prompt["prompt"] for prompt, _ in asked} == {
            "user=sys\n\nask;assistant=",
            "user=ask;assistant=",
        }


def test_models_list_the_variables_of_their_templates(tiny_llm: AsyncLLM) -> None:
    with live(tiny_llm, model={"chat_template": NO_SYSTEM}) as server:
        (card,) = httpx.get(f"{server.base}/v1/models").json()["data"]
        assert card["chat_template_kwargs"] == ["enable_thinking"]
        with scripted(server, "x") as asked:
            post(server, messages=[ASK], chat_template_kwargs={"thinking": True})
        assert asked[0][0]["prompt"] == "user=ask!;assistant="


@pytest.mark.parametrize(
    ("last", "prompt", "text", "reasoning", "content"),
    [
        ({"content": "be", "reasoning_content": "hm"}, "<think>hm</think>be", "gin", None, "gin"),
        ({"reasoning_content": "hm"}, "<think>hm", "m</think>be", "m", "be"),
        ({"content": "be "}, "be ", "gin", None, "gin"),
    ],
)
def test_continued_messages_with_reasoning(
    tiny_llm: AsyncLLM, last: Any, prompt: str, text: str, reasoning: str | None, content: str
) -> None:
    with live(tiny_llm, model={"chat_template": NO_THOUGHTS}) as server, scripted(server, text) as asked:
        messages = [ASK, {"role": "assistant", **last}]
        answer = post(server, messages=messages, continue_final_message=True, add_generation_prompt=False)
        assert asked[0][0]["prompt"] == "user=ask;assistant=" + prompt
        message = answer.json()["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


def test_a_message_that_cannot_be_continued_is_refused(tiny_llm: AsyncLLM) -> None:
    with live(tiny_llm, model={"chat_template": NO_SYSTEM}) as server:
        last = {"role": "assistant", "reasoning_content": "hm"}
        told = post(server, messages=[ASK, last], continue_final_message=True)
        assert told.status_code == 400
        assert "has no place for reasoning" in told.json()["error"]["message"]
