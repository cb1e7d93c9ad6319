"""Responses to the official OpenAI client: complete and streamed, with all optional fields."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.support.server_live import NAME, Live, scripted

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(server: Live) -> OpenAI:
    return OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0, timeout=30)


def test_models(client: OpenAI, server: Live) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == (NAME, "model")
    assert client.models.retrieve(NAME).id == NAME
    assert httpx.get(f"{server.base}/health").status_code == 200
    assert "version" in httpx.get(f"{server.base}/version").json()


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=6, temperature=0)
    (choice,) = answer.choices
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", NAME)
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 6


def test_stream_equals_the_complete_response(client: OpenAI) -> None:
    settings: Any = {"model": NAME, "messages": HELLO, "max_tokens": 20, "temperature": 1, "seed": 3, "n": 2}
    whole = client.chat.completions.create(**settings)
    chunks = list(
        client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True})
    )
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    for index in range(2):
        deltas = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == index]
        assert deltas[0].delta.role == "assistant"
        assert all(d.delta.role is None for d in deltas[1:])
        assert "".join(d.delta.content or "" for d in deltas) == whole.choices[index].message.content
        reasons = [d.finish_reason for d in deltas]
        assert reasons == [None] * (len(deltas) - 1) + [whole.choices[index].finish_reason]
    assert whole.choices[0].message.content != whole.choices[1].message.content


def test_stream_format(server: Live) -> None:
    body = {"messages": HELLO, "max_tokens": 2, "temperature": 0, "stream": True}
    got = httpx.post(f"{server.base}/v1/chat/completions", json=body)
    assert got.headers["content-type"].startswith("text/event-stream")
    events = got.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    first, *_, last = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "usage" not in first
    assert last["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("streamed", [False, True])
def test_chat_logprobs(client: OpenAI, streamed: bool) -> None:
    settings: Any = {"model": NAME, "messages": HELLO, "max_tokens": 4, "temperature": 0}
    asked = {**settings, "logprobs": True, "top_logprobs": 3}
    if streamed:
        chunks = [c.choices[0] for c in client.chat.completions.create(**asked, stream=True)]
        told = [one for c in chunks if c.logprobs for one in c.logprobs.content or []]
    else:
        logprobs = client.chat.completions.create(**asked).choices[0].logprobs
        assert logprobs is not None
        told = logprobs.content or []
    assert len(told) == 4
    for one in told:
        best = one.top_logprobs
        assert [b.logprob for b in best] == sorted((b.logprob for b in best), reverse=True)
        assert len(best) == 3
        assert (best[0].token, best[0].logprob) == (one.token, one.logprob)  # greedy
        assert one.logprob < 0
        assert bytes(one.bytes or []).decode() == one.token


def test_completions_of_several_prompts(client: OpenAI) -> None:
    settings: Any = {"model": NAME, "max_tokens": 5, "temperature": 0}
    several = client.completions.create(prompt=["abc", "xyz"], **settings)
    alone = [client.completions.create(prompt=p, **settings).choices[0].text for p in ("abc", "xyz")]
    assert [c.text for c in several.choices] == alone
    assert [c.index for c in several.choices] == [0, 1]
    assert several.usage is not None
    assert (several.usage.prompt_tokens, several.usage.completion_tokens) == (6, 10)
    streamed = ["", ""]
    for chunk in client.completions.create(prompt=["abc", "xyz"], stream=True, **settings):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == alone


def test_completion_of_tokens(client: OpenAI, server: Live) -> None:
    tokens = httpx.post(f"{server.base}/tokenize", json={"prompt": "abc"}).json()
    assert tokens["count"] == 3
    settings: Any = {"model": NAME, "max_tokens": 5, "temperature": 0}
    by_tokens = client.completions.create(prompt=tokens["tokens"], **settings)
    assert by_tokens.choices[0].text == client.completions.create(prompt="abc", **settings).choices[0].text
    back = httpx.post(f"{server.base}/detokenize", json={"tokens": tokens["tokens"]})
    assert back.json() == {"prompt": "abc"}


def test_echo_and_logprobs(client: OpenAI) -> None:
    got = client.completions.create(
        model=NAME, prompt="abc", max_tokens=2, temperature=0, echo=True, logprobs=2
    )
    (choice,) = got.choices
    assert choice.text.startswith("abc")
    told = choice.logprobs
    assert told is not None
    assert told.tokens is not None and told.tokens[:3] == ["a", "b", "c"]
    assert told.token_logprobs is not None and told.token_logprobs[0] is None
    assert len(told.token_logprobs) == len(told.tokens) == len(told.top_logprobs or []) == 5
    assert told.text_offset == [0, 1, 2, 3, 4]
    only = client.completions.create(model=NAME, prompt="abc", max_tokens=0, echo=True, logprobs=1)
    assert only.choices[0].text == "abc"
    assert only.choices[0].logprobs is not None
    assert only.choices[0].logprobs.token_logprobs == told.token_logprobs[:3]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_of_a_prompt_that_leaves_no_room(server: Live, stream: bool) -> None:
    def echoed(prompt: list[int], logprobs: int | None, **more: Any) -> tuple[dict[str, Any], Any]:
        body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": logprobs, **more}
        got = httpx.post(f"{server.base}/v1/completions", json={**body, "stream": stream}, timeout=60)
        assert got.status_code == 200, got.text
        if not stream:
            return got.json()["choices"][0], got.json()["usage"]
        events = [json.loads(line[6:]) for line in got.text.split("\n\n") if line.startswith("data: {")]
        return events[0]["choices"][0], None

    most = server.served.max_model_len
    prompt = [3 + (7 * index) % 90 for index in range(most)]
    whole, usage = echoed(prompt, 3)
    before, _ = echoed(prompt[:-1], 3)
    told, known = whole["logprobs"], before["logprobs"]
    assert whole["finish_reason"] == "length" and len(told["tokens"]) == len(whole["text"]) == most
    assert told["token_logprobs"][:-1] == pytest.approx(known["token_logprobs"], abs=1e-4, nan_ok=True)
    # the next tokens after the shorter prompt are those at the last place of the whole one
    body = {"prompt": prompt[:-1], "max_tokens": 1, "temperature": 0, "logprobs": 3}
    after = httpx.post(f"{server.base}/v1/completions", json=body, timeout=60).json()["choices"][0]
    best = after["logprobs"]["top_logprobs"][0]
    assert set(best) <= set(told["top_logprobs"][-1])
    assert [told["top_logprobs"][-1][token] for token in best] == pytest.approx([*best.values()], abs=1e-4)
    if usage is not None:
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (most, 0)
    text, _ = echoed(prompt, None, stop="x", min_tokens=0, logit_bias={"5": -100})
    assert text["text"] == whole["text"] and text["logprobs"] is None
    for body in (
        {"prompt": [*prompt, 3], "max_tokens": 0, "echo": True},
        {"prompt": prompt, "max_tokens": 1, "echo": True},
    ):
        refused = httpx.post(f"{server.base}/v1/completions", json=body)
        assert refused.status_code == 400 and "max_model_len" in refused.text


CUT_OFF = {
    '{"city": "Ber': {"city": "Ber"},
    '{"city": "Berlin", "days": [1, 2': {"city": "Berlin", "days": [1, 2]},
    '{"city"': {},
    "{": {},
    "Berlin": {"invalid_json": "Berlin"},
    '{"a": 1} more': {"invalid_json": '{"a": 1} more'},
    "": {},
    '{"a": 1}': {"a": 1},
}


@pytest.mark.parametrize(("arguments", "rendered"), CUT_OFF.items())
@pytest.mark.parametrize("route", ["chat/completions", "responses"])
def test_a_history_may_hold_a_call_that_was_cut_off(
    server: Live, route: str, arguments: str, rendered: dict[str, Any]
) -> None:
    function = {"name": "f", "arguments": arguments}
    if route == "responses":
        call = {"type": "function_call", "call_id": "c", **function}
        body: dict[str, Any] = {"input": [{"role": "user", "content": "a"}, call], "max_output_tokens": 1}
    else:
        turn = {"role": "assistant", "content": None}
        turn["tool_calls"] = [{"id": "c", "type": "function", "function": function}]  # type: ignore[assignment]
        body = {"messages": [*HELLO, turn], "max_tokens": 1}
    with scripted(server, "x") as asked:
        got = httpx.post(f"{server.base}/v1/{route}", json=body, timeout=30)
    assert got.status_code == 200, got.text
    ((prompt, _),) = asked
    said = prompt["prompt"].split("<tool_call>")[1].split("</tool_call>")[0]
    assert json.loads(said) == {"name": "f", "arguments": rendered}


def test_stop_strings_and_logit_bias(client: OpenAI) -> None:
    token = 3 + ord("A") - ord("!")
    bias = {str(token): 100}
    settings: Any = {"model": NAME, "messages": HELLO, "max_tokens": 8, "temperature": 0, "logit_bias": bias}
    assert client.chat.completions.create(**settings).choices[0].message.content == "A" * 8
    stopped = client.chat.completions.create(**settings, stop=["AAA"]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == ("", "stop")


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings(client: OpenAI, server: Live, pooling: str) -> None:
    texts = ["hello", "goodbye", "x" * 300]
    more = {"pooling": pooling}
    got = client.embeddings.create(model=NAME, input=texts, extra_body=more)  # base64, as the client requests
    plain = client.embeddings.create(model=NAME, input=texts, encoding_format="float", extra_body=more)
    for one, other in zip(got.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert sum(x * x for x in one.embedding) == pytest.approx(1, abs=1e-4)
    assert [one.index for one in got.data] == [0, 1, 2]
    assert got.usage.prompt_tokens == 5 + 7 + 300
    short = client.embeddings.create(model=NAME, input="hello", dimensions=8, extra_body=more).data[0]
    assert len(short.embedding) == 8


def test_embeddings_run_between_engine_steps(client: OpenAI) -> None:
    text = "x" * 400
    settings: Any = {"model": NAME, "prompt": "abc", "max_tokens": 200, "temperature": 0}
    alone: Any = client.completions.create(**settings)
    vector = client.embeddings.create(model=NAME, input=text).data[0].embedding
    with ThreadPoolExecutor(4) as clients:
        answers = [clients.submit(client.completions.create, **settings) for _ in range(3)]
        vectors = [client.embeddings.create(model=NAME, input=text).data[0].embedding for _ in range(5)]
        assert [answer.result().choices[0].text for answer in answers] == [alone.choices[0].text] * 3
    assert vectors == [vector] * 5


def test_eight_concurrent_chats_equal_single_chats(server: Live) -> None:
    async def run() -> None:
        client = AsyncOpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0)
        seats = asyncio.Semaphore(8)

        async def ask(number: int) -> str:
            async with seats:
                got = await client.chat.completions.create(
                    model=NAME,
                    messages=[{"role": "user", "content": f"question {number}"}],
                    max_tokens=64,
                    temperature=0,
                )
            return got.choices[0].message.content or ""

        alone = [await ask(number) for number in range(8)]
        assert await asyncio.gather(*map(ask, range(8))) == alone
        assert len(set(alone)) == 8
        await client.close()

    asyncio.run(run())
    assert server.idle
