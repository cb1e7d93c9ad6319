"""Thinking budgets, arguments of logit processors, structural tags and forms of contents in requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.llm.test_request_arguments import CONFIG, Repeat
from tests.support.server_live import NAME, Live, live, scripted
from tests.support.tiny_server import tokenizer
from torch_armllm.llm.async_llm import AsyncLLM

ASK = [{"role": "user", "content": "hi"}]
THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"


@pytest.fixture(scope="module")
def thinking(tiny_checkpoint: Path) -> Iterator[Live]:
    settings: dict[str, Any] = {"reasoning_config": CONFIG, "logits_processors": [Repeat]}
    llm = AsyncLLM(str(tiny_checkpoint), kv_cache_memory=4 << 20, progress=False, **settings)
    with live(llm, model={"chat_template": THINKS}) as server:
        yield server
    llm.shutdown()


def post(server: Live, path: str, **body: Any) -> Any:
    return httpx.post(f"{server.base}{path}", json={"model": NAME, **body}, timeout=60)


@pytest.mark.parametrize("budget", [0, 5])
def test_budgets_of_all_routes(thinking: Live, budget: int) -> None:
    more = {"max_tokens": 40, "temperature": 0}
    chat = post(
        thinking, "/v1/chat/completions", messages=ASK, thinking_token_budget=budget, ignore_eos=True, **more
    ).json()
    tokens = chat["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert tokens == budget + len("</think>")
    text = post(
        thinking, "/v1/completions", prompt="hi<think>", thinking_token_budget=budget, ignore_eos=True, **more
    ).json()["choices"][0]["text"]
    assert text.endswith("</think>" + text.partition("</think>")[2]) and "</think>" in text
    message = post(
        thinking,
        "/v1/messages",
        messages=ASK,
        thinking={"type": "enabled", "budget_tokens": budget},
        **more,
    ).json()
    kinds = [block["type"] for block in message["content"]]
    assert kinds == (["thinking", "text"] if budget else ["text"])


def test_budgets_that_are_refused(thinking: Live, server: Live) -> None:
    told = post(server, "/v1/chat/completions", messages=ASK, thinking_token_budget=5)
    assert (told.status_code, told.json()["error"]["message"]) == (
        400,
        "thinking_token_budget is 5, but it is not known how this model marks its reasoning: give the engine "
        'reasoning_config={"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}',
    )
    assert post(thinking, "/v1/chat/completions", messages=ASK, thinking_token_budget=-2).status_code == 400
    # Anthropic's clients ask for reasoning of any model
    think = {"type": "enabled", "budget_tokens": 5}
    assert post(server, "/v1/messages", messages=ASK, max_tokens=3, thinking=think).status_code == 200


def test_arguments_of_logit_processors(thinking: Live, server: Live) -> None:
    body = {"prompt": "abc", "max_tokens": 9, "vllm_xargs": {"period": 3}, "temperature": 0}
    assert post(thinking, "/v1/completions", **body).json()["choices"][0]["text"] == "abcabcabc"
    told = post(server, "/v1/completions", **body)
    assert (told.status_code, told.json()["error"]["message"]) == (
        400,
        "extra_args sets period, and no logits_processors of this engine read it: leave it out, or give the "
        "engine logits_processors",
    )


TAG = {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": {"const": 7}, "end": "</f>"}]}
FORMAT = {
    "type": "triggered_tags",
    "triggers": ["<f"],
    "tags": [
        {
            "type": "tag",
            "begin": "<f>",
            "content": {"type": "json_schema", "json_schema": {"const": 7}},
            "end": "</f>",
        }
    ],
}


@pytest.mark.parametrize(
    "constraint",
    [
        {"response_format": {"type": "structural_tag", **TAG}},
        {"response_format": {"type": "structural_tag", "format": FORMAT}},
        {"structured_outputs": {"structural_tag": TAG}},
        {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
    ],
    ids=["response format", "format", "dict", "text"],
)
def test_structural_tags(server: Live, constraint: dict[str, Any]) -> None:
    pytest.importorskip("llguidance", reason="needs the extra structured")
    bias = {str(token): 50 for token in tokenizer()("<f")["input_ids"]}
    bias |= {str(token): -100 for token in range(tokenizer().vocab_size) if str(token) not in bias}
    body = {"messages": ASK, "max_tokens": 60, "seed": 3, "logit_bias": bias, **constraint}
    text = post(server, "/v1/chat/completions", **body).json()["choices"][0]["message"]["content"]
    calls = text.split("<f")
    assert len(calls) > 2
    assert all("></f>".startswith(call[:1]) and call.startswith(">7</f>"[: len(call)]) for call in calls[1:])


def test_structural_tags_that_are_refused(server: Live) -> None:
    told = post(server, "/v1/completions", prompt="a", response_format={"type": "structural_tag"})
    assert (told.status_code, told.json()["error"]["message"]) == (
        400,
        'structured outputs: structural_tag needs {"format": {"type": …}}, or {"triggers": [text, …], '
        '"structures": [{"begin": text, "schema": {…}, "end": text}, …]}',
    )


@pytest.mark.parametrize(
    ("template", "content_format", "expected"),
    [
        ("{{ messages[0].content }}", "auto", "a\nb"),
        ("{% for p in messages[0].content %}[{{ p.text }}]{% endfor %}", "auto", "[a][b]"),
        ("{% if messages[0].content is string %}{{ messages[0].content }}{% endif %}", "openai", ""),
        ("{% for p in messages[0].content %}{{ p }};{% endfor %}", "string", "a;\n;b;"),
    ],
)
def test_contents_have_the_form_of_the_template(
    tiny_llm: AsyncLLM, template: str, content_format: str, expected: str
) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    with (
        live(tiny_llm, model={"chat_template": template + "!", "content_format": content_format}) as server,
        scripted(server, "x") as asked,
    ):
        assert post(server, "/v1/chat/completions", messages=parts).status_code == 200
    assert [prompt["prompt"] for prompt, _ in asked] == [expected + "!"]
