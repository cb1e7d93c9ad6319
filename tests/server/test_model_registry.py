"""Several models in one server, loaded and unloaded while others serve."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import NotFoundError, OpenAI

from tests.support.models import tiny
from tests.support.server_live import NAME, Live, live, slowed, until
from tests.support.tiny_server import tokenizer
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.llm.async_llm import AsyncLLM
from torch_armllm.server.model_registry import ModelRegistry
from torch_armllm.server.settings import ModelSettings, ServerSettings

KEY = {"Authorization": "Bearer k"}
ADMIN_KEY = {"Authorization": "Bearer a"}
ASKED: dict[str, Any] = {"prompt": "hello", "max_tokens": 12, "ignore_eos": True, "temperature": 0}
ENGINE: dict[str, Any] = {"kv_cache_memory": 4 << 20, "max_num_seqs": 16}


@pytest.fixture(scope="module")
def other_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first checkpoint's model with other weights."""
    folder = tmp_path_factory.mktemp("other")
    torch.manual_seed(7)
    model = tiny("llama", vocab_size=259, max_position_embeddings=512)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def several(tiny_llm: AsyncLLM) -> Iterator[Live]:
    with live(tiny_llm, engine=ENGINE, api_keys=("k",), admin_api_key="a") as server:
        yield server


def load(server: Live, source: Path | str, name: str, **more: Any) -> httpx.Response:
    body = {"model": str(source), "name": name, **more}
    return httpx.post(f"{server.base}/v1/admin/models", json=body, headers=ADMIN_KEY, timeout=60)


def unload(server: Live, name: str) -> httpx.Response:
    return httpx.delete(f"{server.base}/v1/admin/models/{name}", headers=ADMIN_KEY, timeout=60)


def ask(server: Live, model: str, **more: Any) -> str:
    body = {**ASKED, "model": model, **more}
    got = httpx.post(f"{server.base}/v1/completions", json=body, headers=KEY, timeout=60)
    assert got.status_code == 200, got.text
    assert got.json()["model"] == model
    return str(got.json()["choices"][0]["text"])


def names(server: Live) -> list[str]:
    models = httpx.get(f"{server.base}/v1/models", headers=KEY, timeout=60).json()["data"]
    return [model["id"] for model in models]


def test_load_and_unload_a_model(several: Live, other_checkpoint: Path) -> None:
    alone = ask(several, NAME)
    loaded = load(several, other_checkpoint, "other/one", max_model_len=64)
    assert loaded.status_code == 200, loaded.text
    assert loaded.json()["id"] == "other/one"
    assert loaded.json()["max_model_len"] == 64
    assert loaded.json()["default_sampling_params"]["top_p"] == 1.0
    assert names(several) == [NAME, "other/one"]
    assert ask(several, NAME) == alone != ask(several, "other/one")
    client = OpenAI(base_url=f"{several.base}/v1", api_key="k", max_retries=0)
    assert client.models.retrieve("other/one").id == "other/one"
    page = httpx.get(f"{several.base}/metrics", headers=KEY, timeout=60).text
    assert page.count("# TYPE vllm:num_requests_running gauge") == 1
    assert 'vllm:generation_tokens_total{engine="0",model_name="other/one"} 12.0' in page
    assert unload(several, "other/one").json() == {"id": "other/one", "object": "model", "deleted": True}
    assert names(several) == [NAME]
    with pytest.raises(NotFoundError, match=NAME):
        client.completions.create(model="other/one", prompt="hello")
    assert unload(several, "other/one").status_code == 404
    assert "other/one" not in httpx.get(f"{several.base}/metrics", headers=KEY, timeout=60).text
    assert ask(several, NAME) == alone


def test_two_models_serve_concurrently(several: Live, other_checkpoint: Path) -> None:
    """Outputs equal those of single requests, and neither model waits for the other."""
    assert load(several, other_checkpoint, "other").status_code == 200
    models = [NAME, "other"] * 8
    prompts = [f"text {number}" for number in range(16)]
    alone = [ask(several, m, prompt=p) for m, p in zip(models, prompts, strict=True)]
    with ThreadPoolExecutor(16) as clients:
        asked = [clients.submit(ask, several, m, prompt=p) for m, p in zip(models, prompts, strict=True)]
        assert [answer.result() for answer in asked] == alone
    assert unload(several, "other").status_code == 200


def test_replace_a_model_while_it_generates(
    several: Live, tiny_checkpoint: Path, other_checkpoint: Path
) -> None:
    """The old model finishes its requests; later requests go to the new model."""
    assert load(several, tiny_checkpoint, "chat").status_code == 200
    served = several.registry.find("chat")
    old, new = ask(several, "chat", max_tokens=200), None
    loaded = threading.Event()
    with slowed(served.llm, 0, loaded.is_set), ThreadPoolExecutor(1) as clients:
        asked = clients.submit(ask, several, "chat", max_tokens=200)
        until(lambda: served.admission.num_admitted == 1)
        assert load(several, other_checkpoint, "chat").status_code == 200
        assert not asked.done()
        loaded.set()
        new = ask(several, "chat", max_tokens=200)
        assert asked.result() == old != new
    until(lambda: served.llm.errored)  # it was shut down
    assert names(several) == [NAME, "chat"]
    assert unload(several, "chat").status_code == 200


def test_unloading_frees_all_memory(several: Live, other_checkpoint: Path) -> None:
    def threads() -> int:
        return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0

    assert load(several, other_checkpoint, "other").status_code == 200  # warms up one-time allocations
    assert ask(several, "other") and unload(several, "other").status_code == 200
    before = threads()
    assert load(several, other_checkpoint, "other").status_code == 200
    model = weakref.ref(several.registry.find("other").llm.model)
    ask(several, "other")
    waited = threading.Event()
    with slowed(several.registry.find("other").llm, 0, waited.is_set), ThreadPoolExecutor(2) as clients:
        asked = clients.submit(ask, several, "other", max_tokens=100)
        until(lambda: several.registry.find("other").admission.num_admitted == 1)
        going = clients.submit(unload, several, "other")
        until(lambda: names(several) == [NAME])
        assert not going.done()  # waits for the running request
        waited.set()
        assert asked.result()
        assert going.result().status_code == 200
    gc.collect()
    assert model() is None
    until(lambda: threads() <= before)


def test_all_models_share_one_trace_file(tiny_checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    registry = ModelRegistry(ServerSettings(), {**ENGINE, "trace": str(file)})
    for name in ("a", "b"):
        model = ModelSettings(name, str(tiny_checkpoint))
        registry.register(registry.load_llm(model), model)

    async def answers() -> None:
        for name in ("a", "b", "a"):
            generating = registry.find(name).generate({"prompt": "hello"}, SamplingParams(max_tokens=3), name)
            assert [output async for output in generating]

    asyncio.run(answers())
    registry.close()
    events = json.loads(file.read_text())
    named = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    steps = [named[event["tid"]] for event in events if event["name"] == "step"]
    assert steps == ["a"] * 3 + ["b"] * 3 + ["a"] * 3


def test_invalid_load_requests(several: Live, tmp_path: Path, tiny_checkpoint: Path) -> None:
    answers = [
        load(several, tmp_path / "nothing", "x"),
        load(several, tiny_checkpoint, "x", max_model_len=0),
        load(several, tiny_checkpoint, "x", kv_cache_memory=10**15),
        load(several, tiny_checkpoint, "x", quantization="int9"),
        load(several, tiny_checkpoint, "x", kv_cach_memory=1),
        load(several, "", "x"),
    ]
    for got in answers:
        assert got.status_code == 400, got.text
        assert set(got.json()["error"]) == {"message", "type", "param", "code"}
    assert names(several) == [NAME]
    ask(several, NAME)


def test_failed_load_keeps_the_previous_model(several: Live, tmp_path: Path) -> None:
    alone = ask(several, NAME)
    assert load(several, tmp_path, NAME).status_code == 400
    assert ask(several, NAME) == alone


@pytest.mark.parametrize("keys", [(), ("a",)])
def test_admin_routes_are_off_without_a_key_of_their_own(
    tiny_llm: AsyncLLM, tiny_checkpoint: Path, keys: tuple[str, ...]
) -> None:
    """A client's key does not open them."""
    with live(tiny_llm, api_keys=keys) as server:
        for got in (load(server, tiny_checkpoint, "x"), unload(server, NAME)):
            assert got.status_code == 403
            assert "--admin-api-key" in got.json()["error"]["message"]


@pytest.mark.parametrize("keys", [(), ("k", "a2")])
def test_admin_routes_require_their_key(
    tiny_llm: AsyncLLM, tiny_checkpoint: Path, keys: tuple[str, ...]
) -> None:
    with live(tiny_llm, api_keys=keys, admin_api_key="b") as server:
        for got in (load(server, tiny_checkpoint, "x"), unload(server, NAME)):
            assert got.status_code == 401
        got = httpx.get(f"{server.base}/v1/models", headers={"Authorization": "Bearer b"}, timeout=60)
        assert got.status_code == (401 if keys else 200)  # the admin's key is no client's key


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("threads", 1_000_000),
        ("threads", 0),
        ("max_model_len", 1 << 40),
        ("max_num_seqs", 1 << 40),
        ("max_num_batched_tokens", 1 << 40),
        ("kv_cache_memory", 1 << 60),
        ("dtype", "f" * 100),
        ("model", "m" * 10_000),
        ("chat_template", "t" * (2 << 20)),
    ],
)
def test_fields_of_a_load_request_are_bounded(
    several: Live, tiny_checkpoint: Path, field: str, value: object
) -> None:
    body = {"model": str(tiny_checkpoint), "name": "x", field: value}
    got = httpx.post(f"{several.base}/v1/admin/models", json=body, headers=ADMIN_KEY, timeout=60)
    assert got.status_code == 400
    assert field in got.text
    assert names(several) == [NAME]


@contextmanager
def loading(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Holds loads that have read their weights; yields an event that says so, and one that ends the wait."""
    read, go_on = threading.Event(), threading.Event()
    load_llm = server.registry.load_llm

    def held(model: ModelSettings) -> AsyncLLM:
        llm = load_llm(model)
        read.set()
        assert go_on.wait(60)
        return llm

    monkeypatch.setattr(server.registry, "load_llm", held)
    try:
        yield read, go_on
    finally:
        go_on.set()


def test_load_completes_after_disconnect(
    several: Live, other_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading completes although the client has disconnected."""
    body = json.dumps({"model": str(other_checkpoint), "name": "other"})
    head = (
        f"POST /v1/admin/models HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        "Content-Type: application/json\r\nAuthorization: Bearer a\r\n\r\n"
    )
    with loading(several, monkeypatch) as (read, go_on):
        with socket.create_connection(("127.0.0.1", several.port)) as connection:
            connection.sendall((head + body).encode())
            assert read.wait(60)
        until(lambda: several.connections == 0)
        go_on.set()
        until(lambda: "other" in names(several))
    assert unload(several, "other").status_code == 200


def test_other_models_serve_during_a_load(
    several: Live, other_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = ask(several, NAME)
    with loading(several, monkeypatch) as (read, go_on), ThreadPoolExecutor(1) as clients:
        asked = clients.submit(load, several, other_checkpoint, "other")
        assert read.wait(60)
        assert [ask(several, NAME) for _ in range(3)] == [alone] * 3
        assert names(several) == [NAME]
        go_on.set()
        assert asked.result().status_code == 200
    assert unload(several, "other").status_code == 200
