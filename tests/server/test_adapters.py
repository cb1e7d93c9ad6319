"""LoRA adapters through the server: the official client chooses them by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import BadRequestError, NotFoundError, OpenAI
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.adapters import random_adapter
from tests.support.server_live import NAME, Live, live
from tests.support.tiny_server import checkpoint
from torch_armllm.llm.async_llm import AsyncLLM

ADMIN = "admin-key"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("adapters")
    model = AutoModelForCausalLM.from_pretrained(checkpoint(path / "base"))
    for number in range(3):
        random_adapter(model, path / f"adapter-{number}", number, 1.0)
    return path


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Live]:
    llm = AsyncLLM(str(folder / "base"), enable_lora=True, max_loras=2, progress=False)
    adapters = {"first": str(folder / "adapter-0")}
    with live(llm, model={"adapters": adapters}, admin_api_key=ADMIN) as server:
        yield server


def answer(server: Live, model: str, **options: Any) -> str:
    client = OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "hello"}]
    made = client.chat.completions.create(
        model=model, messages=messages, max_tokens=8, temperature=0, logit_bias={"2": -100}, **options
    )
    assert made.model == model
    return str(made.choices[0].message.content)


def admin(server: Live, route: str, key: str = ADMIN, **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{server.base}/v1/{route}_lora_adapter", json=body, headers=headers, timeout=30)


def names(server: Live) -> dict[str, str | None]:
    """Returns the name of each listed model, and of the model that it adapts."""
    listed = OpenAI(base_url=f"{server.base}/v1", api_key="none").models.list()
    return {model.id: model.parent for model in listed}  # type: ignore[attr-defined]


def test_adapters_are_listed_loaded_and_chosen_by_name(served: Live, folder: Path) -> None:
    assert names(served) == {NAME: None, "first": NAME}
    base, first = answer(served, NAME), answer(served, "first")
    loaded = admin(served, "load", lora_name="second", lora_path=str(folder / "adapter-1"))
    assert loaded.status_code == 200 and loaded.json()["parent"] == NAME
    assert loaded.json()["root"] == str(folder / "adapter-1")
    second = answer(served, "second")
    assert len({base, first, second}) == 3
    assert (answer(served, NAME), answer(served, "first")) == (base, first)
    client = OpenAI(base_url=f"{served.base}/v1", api_key="none")
    assert client.models.retrieve("second").id == "second"
    text = client.completions.create(model="second", prompt=["a", "b"], max_tokens=4)
    assert text.model == "second" and len(text.choices) == 2
    again = admin(served, "load", lora_name="second", lora_path=str(folder / "adapter-2"))
    assert again.status_code == 400 and "in use" in again.json()["error"]["message"]
    assert admin(served, "unload", lora_name="second").json()["deleted"]
    with pytest.raises(NotFoundError, match="'second' does not exist; available models: 'tiny', 'first'"):
        answer(served, "second")
    assert admin(served, "unload", lora_name="second").status_code == 404
    # a third one takes the slot, and the name now stands for other weights
    assert admin(served, "load", lora_name="second", lora_path=str(folder / "adapter-2")).status_code == 200
    assert answer(served, "second") not in (base, first, second)
    assert answer(served, "first") == first
    admin(served, "unload", lora_name="second")


def test_wrong_requests_change_nothing(served: Live, folder: Path, tmp_path: Path) -> None:
    before = answer(served, "first")
    missing = admin(served, "load", lora_name="x", lora_path=str(tmp_path))
    assert missing.status_code == 400 and "cannot be read" in missing.json()["error"]["message"]
    assert admin(served, "load", lora_name="x", lora_path="").status_code == 400
    assert admin(served, "load", key="wrong", lora_name="x", lora_path="y").status_code == 401
    wrong = admin(served, "load", lora_name="x", lora_path="y", base_model="none")
    assert wrong.status_code == 404
    client = OpenAI(base_url=f"{served.base}/v1", api_key="none", max_retries=0)
    with pytest.raises(BadRequestError, match="adapter"):
        client.embeddings.create(model="first", input="a")
    assert answer(served, "first") == before and "x" not in names(served)


QUERY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
DAMAGES: dict[str, tuple[dict[str, Any], Any, str]] = {
    "another base": ({}, lambda t: torch.ones(t.shape[0], t.shape[1] + 1), "an adapter of another model"),
    "rank 0": ({"r": 0}, lambda t: t, "has the rank 0; it must be an integer above 0"),
    "no rows": ({}, lambda t: t[:0], r"has lora_A (0, "),
    "nan": ({}, lambda t: t * float("nan"), "values that are not finite"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_adapters_are_refused_and_nothing_is_lost(
    served: Live, folder: Path, tmp_path: Path, name: str
) -> None:
    before, listed = answer(served, "first"), names(served)
    config, damage, message = DAMAGES[name]
    path = tmp_path / "adapter"
    shutil.copytree(folder / "adapter-1", path)
    settings = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**settings, **config}))
    tensors = load_file(path / "adapter_model.safetensors")
    tensors[QUERY] = damage(tensors[QUERY]).contiguous()
    save_file(tensors, path / "adapter_model.safetensors")
    with ThreadPoolExecutor(1) as client:
        beside = client.submit(answer, served, "first")
        refused = admin(served, "load", lora_name="x", lora_path=str(path))
        assert beside.result() == before
    error = refused.json()["error"]
    assert refused.status_code == 400 and message in error["message"] and error["param"] == "lora_path"
    assert names(served) == listed and answer(served, "first") == before
    assert admin(served, "load", lora_name="x", lora_path=str(folder / "adapter-1")).status_code == 200
    admin(served, "unload", lora_name="x")


def test_routes_need_an_admin_key(server: Live) -> None:
    body = {"lora_name": "x", "lora_path": "y"}
    assert httpx.post(f"{server.base}/v1/load_lora_adapter", json=body).status_code == 403


def test_engine_without_slots_refuses(folder: Path, tiny_llm: AsyncLLM) -> None:
    with live(tiny_llm, admin_api_key=ADMIN) as server:
        refused = admin(server, "load", lora_name="x", lora_path=str(folder / "adapter-0"))
        assert refused.status_code == 400 and "enable_lora" in refused.json()["error"]["message"]
