"""Target: mutated requests to a running server.

Each response is 2xx, 4xx or 503, an error has OpenAI's format, a stream ends with ``[DONE]``, and afterwards
the server completes a prompt as it did at first.
"""

from __future__ import annotations

import atexit
import copy
import json
import os
import random
import shutil
import tempfile
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import httpx

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import of huggingface_hub

from tests.support.server_live import NAME, Live, live, until
from tests.support.tiny_server import checkpoint
from torch_armllm.llm.async_llm import AsyncLLM

ADMIN = "/v1/admin/models"
ADMIN_KEY = "a"
_REASONING = {"reasoning_start_str": "a", "reasoning_end_str": "bc"}
ENGINE: dict[str, Any] = {
    "kv_cache_memory": 4 << 20, "max_num_seqs": 16, "threads": 1, "reasoning_config": _REASONING,
}  # fmt: skip
PROBE = {"prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
_SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, "x"]}}, "required": ["a"]}
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": _SCHEMA}}
_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_SAMPLING: dict[str, Any] = {
    "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "n": 2, "seed": 1, "stop": ["b", "é"],
    "stop_token_ids": [5], "bad_words": ["x"], "allowed_token_ids": [5, 6, 7], "logit_bias": {"5": 2.5},
    "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "min_tokens": 1,
    "ignore_eos": True, "skip_special_tokens": False, "include_stop_str_in_output": True, "priority": 1,
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA}},
    "structured_outputs": {"regex": "[a-z]{2}"}, "stream_options": {"include_usage": True}, "stream": True,
    "thinking_token_budget": 2, "vllm_xargs": {"a": 1},
}  # fmt: skip
_BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "be"}]},
                {"role": "user", "content": "call"},
                {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": "1", "content": "2"},
            ],
            "max_completion_tokens": 6,
            "tools": [_TOOL],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "logprobs": True,
            "top_logprobs": 3,
        },
        {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "max_tokens": 3,
            "continue_final_message": True,
            "add_generation_prompt": False,
            "chat_template_kwargs": {"x": 1},
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "tools": [_TOOL],
        },
    ],
    "/v1/responses": [
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "b"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'},
                {"type": "function_call_output", "call_id": "1", "output": "2"},
            ],
            "max_output_tokens": 4,
            "instructions": "be",
            "text": {"format": {"type": "json_schema", "name": "s", "schema": _SCHEMA}},
            "tools": [{"type": "function", "name": "f", "parameters": _SCHEMA}],
            "tool_choice": "auto",
            "stream": True,
            "store": False,
        },
    ],
    "/v1/completions": [
        {"prompt": "hello", "max_tokens": 4},
        {"prompt": ["a", "b"], "max_tokens": 2, "logprobs": 2, "echo": True, "best_of": 2, "suffix": ""},
        {"prompt": [5, 6, 7], "max_tokens": 3, "n": 2, "temperature": 1.0},
        {"prompt": [[5], [6, 7]], "max_tokens": 1, "prompt_logprobs": 1},
    ],
    "/infill": [
        {
            "input_prefix": "a",
            "input_suffix": "b",
            "input_extra": [{"filename": "f", "text": "c"}],
            "prompt": "d",
            "n_predict": 3,
            "stop": ["x"],
        },
    ],
    "/v1/embeddings": [
        {"input": "hello", "model": NAME},
        {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 8},
        {"input": [[5, 6]], "model": NAME},
    ],
    "/tokenize": [{"prompt": "hello"}, {"messages": [{"role": "user", "content": "hi"}]}],
    "/detokenize": [{"tokens": [5, 6, 7]}],
    ADMIN: [{"model": "nothing", "name": "m", "max_model_len": 64, "threads": 1}],
}
_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 0.5, 1e308, -1e-300, 2**31, 2**63, -(2**63), 10**40, "", "a", "\0",
    "\ud800", "\N{REPLACEMENT CHARACTER}", "\N{FAMILY}", "a" * 3000, "{{ 1/0 }}", "start: start", "(",
    "none", "auto", "required", "text", [], [[]], {}, [None], [0] * 600, ["a"] * 70, {"a": {"a": {}}},
    {"type": "json_object"}, {"json": {"const": -(2**63)}}, {"choice": ["a", "é"]},
    {"grammar": "start: start"}, {"grammar": "root ::= [a-c] root | \"\\u00e9\""},
    {"structural_tag": {"triggers": ["a"], "structures": [{"begin": "ab", "schema": {}, "end": ""}]}},
    {"structural_tag": {"format": {"type": "any_text", "excludes": ["a"]}}}, {"type": "any_text"},
    {"json_object": True, "whitespace_pattern": " ?"},
    {"json": {"multipleOf": 1e6 + 3}}, [-1], [258], [259], ["\ud800"],
]  # fmt: skip
_NOISE = [
    b"",
    b"\0",
    b"\xff",
    b"{",
    b"}",
    b"[",
    b'"',
    b",",
    b"\\u0000",
    b"\\ud800",
    b"1e999",
    b"NaN",
    b"-",
    b"[" * 3000,
]


class Finding(Exception):
    """A response that a client should not get, or a server that no longer answers."""


@cache
def server() -> tuple[Live, httpx.Client, str]:
    """Starts the server; returns it with a client and its text for `PROBE`."""
    folder = Path(tempfile.mkdtemp(prefix="armllm-fuzz-"))
    stack = ExitStack()
    atexit.register(stack.close)
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    llm = AsyncLLM(str(checkpoint(folder)), progress=False, **ENGINE)
    stack.callback(llm.shutdown)
    running = stack.enter_context(live(llm, engine=ENGINE, max_tokens=8, admin_api_key=ADMIN_KEY))
    client = stack.enter_context(httpx.Client(base_url=running.base, timeout=30))
    return running, client, _probe(client)


def _probe(client: httpx.Client) -> str:
    got = client.post("/v1/completions", json=PROBE)
    if got.status_code != 200:
        raise Finding(f"the probe: {got.status_code} {got.text}")
    return str(got.json()["choices"][0]["text"])


def mutate(draw: random.Random, value: Any) -> Any:
    """Replaces, adds, drops or repeats a random part of a JSON value, in place where it can."""
    if not isinstance(value, (dict, list)) or not value or draw.random() < 0.15:
        return copy.deepcopy(draw.choice(_VALUES))
    key: Any = draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value))
    kind = draw.random()
    if kind < 0.1:
        del value[key]
    elif kind < 0.2 and isinstance(value, dict):
        value[draw.choice([*_SAMPLING, "unknown", "", "model", "\0"])] = copy.deepcopy(draw.choice(_VALUES))
    elif kind < 0.25 and isinstance(value, list):
        value *= draw.choice([2, 40])
    else:
        value[key] = mutate(draw, value[key])
    return value


def draw_request(draw: random.Random) -> tuple[str, str, bytes, dict[str, str]]:
    """Returns method, path, body and headers."""
    path = draw.choice(list(_BODIES))
    body: Any = copy.deepcopy(draw.choice(_BODIES[path]))
    if "max_tokens" in body or "max_completion_tokens" in body:
        for name in draw.sample(list(_SAMPLING), draw.choice([0, 1, 1, 2, 4])):
            body[name] = copy.deepcopy(_SAMPLING[name])
    for _ in range(draw.choice([0, 1, 1, 1, 2, 5])):
        body = mutate(draw, body)
    content = json.dumps(body).encode()
    if draw.random() < 0.15:
        for _ in range(draw.choice([1, 3])):
            start = draw.randint(0, len(content))
            content = content[:start] + draw.choice(_NOISE) + content[start + draw.choice([0, 1, 20]) :]
    headers = {"Content-Type": "application/json"}
    if path == ADMIN:
        headers["Authorization"] = f"Bearer {ADMIN_KEY}"
    if draw.random() < 0.05:
        headers["Content-Type"] = draw.choice(["", "text/plain", "application/json; charset=utf-16"])
    if draw.random() < 0.03:
        path += draw.choice(["/", "/%00", "/..", "?model=\N{SNOWMAN}", "/" + "a" * 4000])
    method = draw.choice(["PUT", "GET", "DELETE", "HEAD"]) if draw.random() < 0.03 else "POST"
    return method, path, content, headers


def check(got: httpx.Response) -> None:
    """Raises Finding unless a response is one that a client can act on."""
    status = got.status_code
    if not (200 <= status < 300 or 400 <= status < 500 or status in (307, 503)):
        raise Finding(f"status {status}: {got.text[:500]}")
    if status >= 400:
        if got.request.method != "HEAD" and set(got.json()["error"]) != {"message", "type", "param", "code"}:
            raise Finding(f"status {status} has no error of OpenAI's format: {got.text[:500]}")
    elif got.headers.get("content-type", "").startswith("text/event-stream"):
        events = [line for line in got.text.split("\n") if line.startswith("data: ")]
        ends = ("[DONE]", '{"type":"response.completed"', '{"type":"response.incomplete"')
        if not events or not events[-1].removeprefix("data: ").startswith(ends):
            raise Finding(f"a stream ends without [DONE]: {got.text[-500:]}")
        for event in events[:-1]:
            if "error" in json.loads(event.removeprefix("data: ")):
                raise Finding(f"an error in a stream: {event}")
    elif got.headers.get("content-type") == "application/json":
        got.json()


def run(seed: int) -> None:
    """Sends a mutated request.

    Raises:
        Finding: the response is none that a client can act on, or the server does not answer afterwards.
    """
    draw = random.Random(f"http {seed}")
    running, client, expected = server()
    method, path, content, headers = draw_request(draw)
    try:
        got = client.request(method, path, content=content, headers=headers)
        check(got)
    except (Finding, ValueError, KeyError, httpx.HTTPError) as error:
        raise Finding(f"{method} {path} {headers} {content[:2000]!r}: {error!r}") from error
    if running.llm.errored:
        raise Finding(f"{method} {path} {content[:2000]!r} ended the engine")
    if seed % 16 == 0:
        until(lambda: running.idle)
        if (text := _probe(client)) != expected:
            raise Finding(f"{path} {content[:2000]!r}: {PROBE} returns {text!r}, and {expected!r} before")
