"""Models on a local Ray cluster."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("ray.serve", reason="needs the extra ray")

import ray
from ray import serve

from tests.support.server_live import until
from tests.support.tiny_server import checkpoint
from torch_armllm.llm.llm import LLM
from torch_armllm.serve_ray.application import RayModel, application
from torch_armllm.serve_ray.relayed_request import model_and_text

ENGINE: dict[str, Any] = {"kv_cache_memory": 4 << 20}
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 16, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def base(folder: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    sizes: dict[str, Any] = {"cores": 1, "min_replicas": 2, "max_replicas": 2, "engine": ENGINE}
    serve.run(application([RayModel(str(folder), "tiny", **sizes)]))
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


def _post(base: str, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    return httpx.post(f"{base}{path}", json={**BODY, **fields}, timeout=60)


def _cached(answer: httpx.Response) -> tuple[int, int]:
    usage = answer.json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


@pytest.mark.slow
def test_answers_and_streams_are_those_of_an_engine(base: str, folder: Path) -> None:
    assert [model["id"] for model in httpx.get(f"{base}/v1/models").json()["data"]] == ["tiny"]
    texts = [f"text {number}" for number in range(6)]
    found = [_post(base, prompt=text).json()["choices"][0]["text"] for text in texts]
    llm = LLM(str(folder), progress=False, **ENGINE)
    params = llm.get_default_sampling_params()
    params.temperature, params.max_tokens, params.ignore_eos = 0.0, 16, True
    assert found == [o.outputs[0].text for o in llm.generate(texts, params, use_tqdm=False)]
    streamed = _post(base, prompt=texts[0], stream=True)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    parts = [json.loads(part) for part in streamed.text.split("data: ") if "{" in part]
    assert "".join(part["choices"][0]["text"] for part in parts) == found[0]


@pytest.mark.slow
def test_turns_of_a_conversation_find_their_blocks(base: str) -> None:
    for number in range(6):
        messages = [{"role": "user", "content": f"{number}: " + "word " * 30}]
        for turn in range(3):
            answer = _post(base, "/v1/chat/completions", messages=messages)
            cached, prompt = _cached(answer)
            assert turn == 0 or cached >= prompt // 2
            messages.append(answer.json()["choices"][0]["message"])
            messages.append({"role": "user", "content": "and more"})


@pytest.mark.slow
def test_errors_and_clients_that_leave(base: str) -> None:
    unknown = _post(base, model="other", prompt="a")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert _post(base, prompt="a", temperature=-1).status_code == 400
    assert httpx.get(f"{base}/nothing").status_code == 404
    assert httpx.get(f"{base}/health").status_code == 200
    body = {**BODY, "prompt": "a", "max_tokens": 400, "stream": True}
    for _ in range(8):
        with httpx.stream("POST", f"{base}/v1/completions", json=body, timeout=60) as got:
            next(got.iter_raw())
    until(lambda: _metric(base, "vllm:num_requests_running{") == 0)
    assert _metric(base, 'vllm:request_success_total{finished_reason="abort"') > 0


def _metric(base: str, begin: str) -> float:
    """Returns a metric of the replica that answers where none has more to do: the first."""
    lines = httpx.get(f"{base}/metrics").text.splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(begin)), 0.0)


@pytest.mark.slow
def test_another_model_takes_the_place_of_one_without_a_gap(base: str, folder: Path) -> None:
    expected = _post(base, prompt="a").json()["choices"][0]["text"]
    sizes: dict[str, Any] = {"cores": 1, "max_replicas": 1, "engine": ENGINE}
    other = RayModel(str(folder), "other", **sizes)
    swapped = RayModel(str(folder), "tiny", **{**sizes, "engine": {**ENGINE, "max_model_len": 64}})
    over = threading.Event()

    def ask() -> set[int]:
        codes = set()
        while not over.is_set():
            codes.add(_post(base, prompt="a").status_code)
        return codes

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        serve.run(application([swapped, other]))
        over.set()
        assert asking.result() == {200}
    assert _post(base, prompt="a").json()["choices"][0]["text"] == expected
    assert _post(base, prompt="a", model="other").json()["choices"][0]["text"] == expected
    models = httpx.get(f"{base}/v1/models").json()["data"]
    assert {model["id"]: model["max_model_len"] for model in models} == {"tiny": 64, "other": 512}


@pytest.mark.slow
def test_a_replica_has_ranks_in_a_placement_group_of_its_own(base: str, folder: Path) -> None:
    expected = _post(base, prompt="a").json()["choices"][0]["text"]
    engine = {**ENGINE, "tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    serve.run(application([RayModel(str(folder), "ranks", cores=1, max_replicas=1, engine=engine)]))
    (group,) = [g for g in ray.util.placement_group_table().values() if g["state"] == "CREATED"]
    assert [bundle["CPU"] for bundle in group["bundles"].values()] == [1, 1]
    assert group["strategy"] == "PACK"
    assert _post(base, prompt="a", model="ranks").json()["choices"][0]["text"] == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cores": 0}, "cores = 0: give at least 1"),
        ({"min_replicas": 9}, "min_replicas = 9: give 0 to max_replicas, 4"),
        ({"engine": {"max_model_length": 5}}, "unknown setting 'max_model_length'"),
        ({"engine": {"data_parallel_size": 2}}, "give max_replicas"),
        ({"engine": {"distributed_executor_backend": "ray"}}, "starts ranks of a replica: give"),
    ],
)
def test_bad_settings_are_refused_before_anything_starts(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RayModel("folder", **fields)


def test_models_need_names() -> None:
    with pytest.raises(ValueError, match="give each model a name of its own"):
        application([RayModel("a"), RayModel("a")])
    with pytest.raises(ValueError, match="0 models"):
        application([])


def test_the_text_of_a_request() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    name, text = model_and_text(json.dumps({"messages": messages, "model": "m"}).encode())
    assert name == "m" and b"hello" in text
    longer = model_and_text(json.dumps({"messages": [*messages, {"role": "assistant"}]}).encode())[1]
    assert longer.startswith(text)
    assert model_and_text(b"[1]") == model_and_text(b"{") == (None, b"")
