"""Routes of pooling models: results equal `LLM`'s, both kinds of models in one server, limits, and errors."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from openai import BadRequestError, OpenAI

from tests.support.pooling_folders import TEXTS, patched_model, pooling_folder, with_modules
from tests.support.server_live import NAME, Live, live, until
from tests.support.tiny_server import tokenizer
from torch_armllm import LLM, AsyncLLM
from torch_armllm.server.settings import ModelSettings

EXACT: dict[str, Any] = {"quantization": None, "progress": False}
ROUTES = {
    "/v1/embeddings": {"input": "a"},
    "/pooling": {"input": "a"},
    "/classify": {"input": "a"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    made = {
        "embed": patched_model("embed"),
        "classify": patched_model("classify"),
        "rank": patched_model("classify", 1),
    }
    for name, model in made.items():  # says in which folder its files are
        model.name_or_path = str(tmp_path_factory.mktemp(name))
    with_modules(
        Path(made["embed"].name_or_path),
        {"Pooling": {"pooling_mode": "lasttoken"}, "Normalize": {}},
        config_sentence_transformers={"prompts": {"query": "find: "}},
    )
    return made


@pytest.fixture(scope="module")
def pooling(tiny_llm: AsyncLLM, models: dict[str, Any]) -> Iterator[Live]:
    """A server of a generating model and three that pool."""
    engines = {name: AsyncLLM(model, tokenizer()) for name, model in models.items()}
    with live(tiny_llm) as server:
        for name, llm in engines.items():
            server.registry.register(llm, ModelSettings(name))
        yield server
    for llm in engines.values():
        llm.shutdown()


def load(model: Any) -> LLM:
    return LLM(model, tokenizer(), progress=False)


@pytest.fixture(scope="module")
def offline(models: dict[str, Any]) -> LLM:
    return load(models["embed"])


def post(server: Live, path: str, status: int = 200, **body: Any) -> Any:
    got = httpx.post(server.base + path, json=body, timeout=60)
    assert got.status_code == status, got.text
    return got.json() if status == 200 else got.json()["error"]


def test_embeddings_by_the_openai_client(pooling: Live, offline: LLM) -> None:
    client = OpenAI(base_url=f"{pooling.base}/v1", api_key="none", max_retries=0)
    wanted = [each.outputs.embedding for each in offline.embed(TEXTS, use_tqdm=False)]
    got = client.embeddings.create(model="embed", input=TEXTS)  # base64
    plain = client.embeddings.create(model="embed", input=TEXTS, encoding_format="float")
    ids = [tokenizer()(text)["input_ids"] for text in TEXTS]
    by_ids = client.embeddings.create(model="embed", input=ids)
    for answer in (got, plain, by_ids):
        assert [each.index for each in answer.data] == list(range(len(TEXTS)))
        assert [each.embedding for each in answer.data] == wanted
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
        assert answer.model == "embed"
    short = client.embeddings.create(model="embed", input=TEXTS[0], dimensions=8).data[0].embedding
    cut = torch.nn.functional.normalize(torch.tensor(wanted[0][:8]), dim=0)
    assert short == pytest.approx(cut.tolist(), abs=1e-6)
    query = client.embeddings.create(model="embed", input=TEXTS[0], extra_body={"prompt_name": "query"})
    prompted = offline.embed("find: " + TEXTS[0], use_tqdm=False)[0].outputs.embedding
    assert query.data[0].embedding == prompted
    with pytest.raises(BadRequestError, match="dimensions is 65, and the model's vectors have 64"):
        client.embeddings.create(model="embed", input="a", dimensions=65)
    with pytest.raises(BadRequestError, match="prompt_name is 'no'; this model has query"):
        client.embeddings.create(model="embed", input="a", extra_body={"prompt_name": "no"})
    with pytest.raises(BadRequestError, match="this input has 200 tokens, and the model takes 128"):
        client.embeddings.create(model="embed", input="x" * 200)
    more = {"truncate_prompt_tokens": -1}
    assert (
        client.embeddings.create(model="embed", input="x" * 200, extra_body=more).usage.prompt_tokens == 128
    )
    with pytest.raises(BadRequestError, match="this input has no tokens; give a text that is not empty"):
        client.embeddings.create(model="embed", input=["a", ""])
    with pytest.raises(BadRequestError, match="pooling is 'mean', and the files of 'embed' define it"):
        client.embeddings.create(model="embed", input="a", extra_body={"pooling": "mean"})
    with pytest.raises(BadRequestError, match="truncate_prompt_tokens is 0; give at least 1, or -1"):
        client.embeddings.create(model="embed", input="a", extra_body={"truncate_prompt_tokens": 0})
    with pytest.raises(BadRequestError, match="token id 259 is out of range"):
        client.embeddings.create(model="embed", input=[259])


def test_concurrent_requests_get_the_same_numbers(pooling: Live) -> None:
    def embedding(text: str) -> Any:
        return post(pooling, "/v1/embeddings", model="embed", input=text)["data"][0]["embedding"]

    texts = [text + str(number) for number in range(4) for text in TEXTS]
    alone = [embedding(text) for text in texts]
    with ThreadPoolExecutor(16) as clients:
        assert list(clients.map(embedding, texts)) == alone


def test_ranks_and_scores(pooling: Live, models: dict[str, Any], offline: LLM) -> None:
    for name, llm in (("rank", load(models["rank"])), ("embed", offline)):
        wanted = [each.outputs.score for each in llm.score("a query", TEXTS, use_tqdm=False)]
        got = post(pooling, "/score", model=name, text_1="a query", text_2=TEXTS)
        assert [each["score"] for each in got["data"]] == pytest.approx(wanted, abs=1e-6)
        same = post(pooling, "/v1/score", model=name, queries=["a query"], documents=TEXTS)
        assert same["data"] == got["data"] and same["usage"] == got["usage"]
        order = sorted(range(len(TEXTS)), key=lambda index: -wanted[index])
        documents = [TEXTS[0], *({"text": text} for text in TEXTS[1:])]
        ranked = post(pooling, "/v1/rerank", model=name, query="a query", documents=documents)
        assert [each["index"] for each in ranked["results"]] == order
        assert [each["document"]["text"] for each in ranked["results"]] == [TEXTS[index] for index in order]
        assert ranked["results"][0]["relevance_score"] == pytest.approx(max(wanted), abs=1e-6)
        more = {"top_n": 2, "return_documents": False}
        best = post(pooling, "/v2/rerank", model=name, query="a query", documents=documents, **more)
        assert [each["index"] for each in best["results"]] == order[:2] and "document" not in best["results"][
            0
        ]
    logit = post(pooling, "/score", model="rank", text_1="a", text_2="b", use_activation=False)
    probability = post(pooling, "/score", model="rank", text_1="a", text_2="b")
    found = torch.tensor(logit["data"][0]["score"]).sigmoid()
    assert probability["data"][0]["score"] == pytest.approx(float(found), abs=1e-6)
    error = post(pooling, "/score", 400, model="rank", text_1=["a", "b"], text_2=["c"])
    assert error["message"] == "there are 2 queries for 1 documents: give one, or one each"
    error = post(pooling, "/rerank", 400, model="classify", query="a", documents=["b"])
    assert "cannot score: it computes classify, and a score needs" in error["message"]


@pytest.mark.parametrize("documents", [[], [""], ["a", ""], [{"text": ""}]])
def test_empty_documents_are_refused_and_nothing_is_lost(pooling: Live, documents: list[Any]) -> None:
    before = post(pooling, "/rerank", model="embed", query="a", documents=["b", "c"])["results"]
    error = post(pooling, "/rerank", 400, model="embed", query="a", documents=documents)
    wanted = "no tokens; give a text that is not empty" if documents else "documents"
    assert wanted in f"{error['param']} {error['message']}"
    assert post(pooling, "/rerank", model="embed", query="a", documents=["b", "c"])["results"] == before


def test_classes_and_pooling(pooling: Live, models: dict[str, Any], offline: LLM) -> None:
    llm = load(models["classify"])
    wanted = [each.outputs.probs for each in llm.classify(TEXTS, use_tqdm=False)]
    got = post(pooling, "/classify", model="classify", input=TEXTS)["data"]
    assert [each["probs"] for each in got] == [pytest.approx(each, abs=1e-6) for each in wanted]
    assert [each["label"] for each in got] == [f"LABEL_{np.argmax(each)}" for each in wanted]
    same = post(pooling, "/pooling", model="classify", input=TEXTS)["data"]
    assert [each["data"] for each in same] == [each["probs"] for each in got]
    (hidden,) = offline.encode("abc", use_tqdm=False, pooling_task="token_embed")
    more = {"model": "embed", "input": "abc", "task": "token_embed"}
    (rows,) = post(pooling, "/pooling", **more)["data"]
    assert torch.allclose(torch.tensor(rows["data"]), hidden.outputs.data, atol=1e-6)
    (packed,) = post(pooling, "/pooling", **more, encoding_format="base64")["data"]
    numbers = np.frombuffer(base64.b64decode(packed["data"]), np.float32).reshape(3, 64)
    assert np.array_equal(numbers, np.float32(rows["data"]))
    error = post(pooling, "/pooling", 400, model="embed", input=["x" * 128] * 1100, task="token_embed")
    assert "the input has 140800 tokens in all, and token_embed returns at most 131072" in error["message"]
    error = post(pooling, "/v1/embeddings", 400, model="classify", input="a")
    assert "does not compute 'embed'; it computes classify" in error["message"]


@pytest.mark.parametrize("path", ROUTES)
def test_each_kind_of_model_refuses_the_routes_of_the_other(pooling: Live, path: str) -> None:
    if path != "/v1/embeddings":  # which generating models answer with their hidden states
        error = post(pooling, path, 400, model=NAME, **ROUTES[path])
        assert error["code"] == "wrong_kind_of_model" and error["param"] == "model"
        assert f"'{NAME}' generates, and {path} needs one that pools" in error["message"]
    for field in ("model", *ROUTES[path]):
        error = post(pooling, path, 400, **{**ROUTES[path], "model": "embed", field: 7})
        assert error["param"].startswith(field) or error["param"]


def test_models_of_both_kinds(pooling: Live) -> None:
    message = [{"role": "user", "content": "a"}]
    for path, body in (("/v1/chat/completions", {"messages": message}), ("/v1/completions", {"prompt": "a"})):
        error = post(pooling, path, 400, model="rank", **body)
        assert "'rank' pools (classify, score), and" in error["message"]
        assert "--runner generate" in error["message"]
        post(pooling, path, **body, max_tokens=1)
    assert post(pooling, "/rerank", query="a", documents=["b"])["model"] == "embed"  # the first that pools
    assert post(pooling, "/tokenize", model="rank", prompt="abc")["count"] == 3
    cards = httpx.get(f"{pooling.base}/v1/models").json()["data"]
    assert {card["id"]: card["tasks"] for card in cards} == {
        NAME: ["generate"],
        "embed": ["embed", "token_embed"],
        "classify": ["classify"],
        "rank": ["classify", "score"],
    }
    assert cards[1]["max_model_len"] == 128 and cards[1]["default_sampling_params"] == {}
    page = httpx.get(f"{pooling.base}/metrics").text
    assert 'vllm:request_success_total{finished_reason="stop",model_name="embed"}' in page.replace(
        'model_name="embed",finished_reason="stop"', 'finished_reason="stop",model_name="embed"'
    )
    assert 'vllm:num_requests_waiting{engine="0",model_name="embed"} 0.0' in page
    assert httpx.get(f"{pooling.base}/health").status_code == 200
    error = post(pooling, "/v1/embeddings", 400, model=NAME, input="a", prompt_name="query")
    assert "prompt_name is for models that pool" in error["message"]


def a_while() -> None:
    time.sleep(0.1)


@contextmanager
def held(llm: AsyncLLM, wait: Callable[[], object] = a_while) -> Iterator[None]:
    """Delays every batch."""
    engine: Any = llm.pooling_engine
    compute = engine.model.compute

    def slow(inputs: Any) -> Any:
        wait()
        return compute(inputs)

    engine.model.compute = slow
    try:
        yield
    finally:
        del engine.model.compute


@pytest.fixture(scope="module")
def one_at_a_time(models: dict[str, Any]) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(models["embed"], tokenizer(), max_num_seqs=1)
    yield llm
    llm.shutdown()


def test_limits(one_at_a_time: AsyncLLM) -> None:
    more: dict[str, Any] = {"max_queue": 1, "max_tokens_per_minute": 1000, "max_request_bytes": 5000}
    engine: Any = one_at_a_time.pooling_engine
    many = {"input": ["a"] * 50}

    def is_idle(server: Live) -> bool:
        return not engine.has_unfinished_requests() and not server.served.admission.num_admitted

    with live(one_at_a_time, "embed", request_timeout=0.3, **more) as server:
        with held(one_at_a_time):
            late = httpx.post(f"{server.base}/v1/embeddings", json=many, timeout=60)
        assert late.status_code == 504, late.text
        assert "more than 0.3 seconds; send fewer texts" in late.json()["error"]["message"]
        until(lambda: is_idle(server))
    with live(one_at_a_time, "embed", **more) as server:
        go_on = threading.Event()
        with held(one_at_a_time, go_on.wait), ThreadPoolExecutor(2) as clients:
            # the engine gets one input of a request at a time, and only that one has a place
            first = clients.submit(httpx.post, f"{server.base}/v1/embeddings", json=many, timeout=60)
            until(lambda: server.served.admission.num_admitted == 1)
            second = clients.submit(httpx.post, f"{server.base}/v1/embeddings", json=many, timeout=60)
            until(lambda: server.served.admission.num_admitted == 2)
            refused = httpx.post(f"{server.base}/v1/embeddings", json={"input": "a"})
            go_on.set()
            assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
            assert first.result().status_code == second.result().status_code == 200
        # a client that leaves ends its request
        with held(one_at_a_time), pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.base}/v1/embeddings", json=many, timeout=httpx.Timeout(60, read=0.5))
        until(lambda: is_idle(server))
        until(lambda: not one_at_a_time._thread._streams)
        large = httpx.post(f"{server.base}/rerank", json={"query": "a", "documents": ["x" * 6000]})
        assert large.status_code == 413
        more_documents = {"query": "a", "documents": [""] * 2049}
        assert httpx.post(f"{server.base}/rerank", json=more_documents).status_code in (400, 413)
        for _ in range(10):
            got = httpx.post(f"{server.base}/v1/embeddings", json={"input": ["x" * 120] * 2})
        assert got.status_code == 429 and got.json()["error"]["code"] == "client_tokens"
        page = httpx.get(f"{server.base}/metrics").text
        assert 'finished_reason="abort"' in page


def test_a_failed_batch_ends_its_requests_only(one_at_a_time: AsyncLLM) -> None:
    engine: Any = one_at_a_time.pooling_engine

    def fail(inputs: Any) -> Any:
        raise MemoryError("no room")

    with live(one_at_a_time, "embed") as server:
        engine.model.compute = fail
        try:
            error = post(server, "/v1/embeddings", 500, input="a")
        finally:
            del engine.model.compute
        assert error["code"] == "step_failed" and "no room" in error["message"]
        until(lambda: not one_at_a_time._thread._streams)
        post(server, "/v1/embeddings", input="a")


def test_a_pooling_model_is_loaded_and_unloaded(tiny_llm: AsyncLLM, tmp_path: Path) -> None:
    pooling_folder(tmp_path, "generate")
    key = {"Authorization": "Bearer a"}
    with live(tiny_llm, engine=EXACT, admin_api_key="a") as server:
        path = f"{server.base}/v1/admin/models"
        body = {"model": str(tmp_path), "name": "e", "runner": "pooling", "max_model_len": 9}
        body |= {"pooler_config": {"pooling_type": "MEAN"}}
        card = httpx.post(path, json=body, headers=key, timeout=60).json()
        assert card["tasks"] == ["embed", "token_embed"] and card["max_model_len"] == 9
        assert len(post(server, "/v1/embeddings", model="e", input="a")["data"]) == 1
        wrong = {**body, "pooler_config": {"pooling_type": "no"}}
        got = httpx.post(path, json=wrong, headers=key, timeout=60)
        assert got.status_code == 400 and "pooling_type is 'no'; give one of LAST" in got.text, json.dumps(
            card
        )
        assert httpx.delete(f"{path}/e", headers=key, timeout=60).json()["deleted"]
        assert (
            post(server, "/rerank", 404, model="e", query="a", documents=["b"])["code"] == "model_not_found"
        )
        assert 'model_name="e"' not in httpx.get(f"{server.base}/metrics").text
