"""Random sequences of requests, where later ones use what earlier ones returned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.support.server_live import NAME, live, until
from torch_armllm.llm.async_llm import AsyncLLM

schemathesis = pytest.importorskip("schemathesis", reason="needs the extra test")

_STEPS = ["/v1/models", "/v1/models/{name}", "/v1/completions", "/v1/admin/models", "/v1/admin/models/{name}"]
_NAMED = {"name": "$response.body#/id"}
_KEYS = {"Authorization": "Bearer a"}


def _description(base: str, source: Path) -> dict[str, Any]:
    """Returns the server's OpenAPI document: loads are of one folder, and what was loaded is then used."""
    whole = httpx.get(f"{base}/openapi.json", headers=_KEYS).json()
    paths = whole["paths"] = {path: whole["paths"][path] for path in _STEPS}
    fields = whole["components"]["schemas"]["LoadRequest"]
    fields["properties"] = {
        "model": {"enum": [str(source), str(source / "missing")]},
        "name": {"enum": [NAME, "a", "b/c", "ü", "", None, 3]},
    }
    fields["required"] = ["model", "name"]
    # With all its fields hardly a body drawn at random is valid.
    completion = whole["components"]["schemas"]["CompletionRequest"]
    completion["properties"] = {"model": {"enum": [NAME, "a", "b/c"]}, "prompt": {"enum": ["a b"]}}
    completion["properties"]["max_tokens"] = {"enum": [3]}
    completion["additionalProperties"] = False
    links: dict[str, Any] = {
        operation["operationId"]: {"operationId": operation["operationId"], "parameters": _NAMED}
        for operation in (paths["/v1/models/{name}"]["get"], paths["/v1/admin/models/{name}"]["delete"])
    }
    links["complete"] = {
        "operationId": paths["/v1/completions"]["post"]["operationId"],
        "requestBody": {"model": "$response.body#/id", "prompt": "a b", "max_tokens": 3},
    }
    paths["/v1/admin/models"]["post"]["responses"]["200"]["links"] = links
    return whole


@pytest.mark.usefixtures("stored_plans")
def test_models_come_and_go_in_any_order(packed_checkpoint: Path) -> None:
    engine = {"kv_cache_memory": 1 << 20, "max_num_seqs": 4, "threads": 1}
    llm = AsyncLLM(str(packed_checkpoint), progress=False, **engine)
    statuses: set[tuple[str, str, int]] = set()
    with live(llm, engine=engine, admin_api_key="a", api_keys=("k", "a")) as server:

        def complete() -> str:
            body = {"model": NAME, "prompt": "a b", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
            got = httpx.post(f"{server.base}/v1/completions", json=body, headers=_KEYS, timeout=60)
            assert got.status_code == 200, got.text
            return str(got.json()["choices"][0]["text"])

        expected = complete()
        schema = schemathesis.openapi.from_dict(_description(server.base, packed_checkpoint))

        class Client(schema.as_state_machine()):  # type: ignore[misc]
            def call(self, case: Any, **_: Any) -> Any:
                got = case.call(base_url=server.base, headers=_KEYS, timeout=60)
                statuses.add((case.method, case.path, got.status_code))
                return got

            def validate_response(self, response: Any, case: Any, **_: Any) -> None:
                assert response.status_code < 500, response.text
                if response.status_code >= 400 and case.method != "GET":
                    error = json.loads(response.text)["error"]
                    assert set(error) == {"message", "type", "param", "code"} and error["message"]

        run_state_machine_as_test(
            Client,
            settings=settings(
                max_examples=30,
                stateful_step_count=8,
                deadline=None,
                derandomize=True,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
        body = {"model": str(packed_checkpoint), "name": NAME}
        assert httpx.post(f"{server.base}/v1/admin/models", json=body, headers=_KEYS, timeout=60).is_success
        assert complete() == expected
        for model in httpx.get(f"{server.base}/v1/models", headers=_KEYS).json()["data"]:
            path = f"{server.base}/v1/admin/models/{model['id']}"
            assert httpx.delete(path, headers=_KEYS, timeout=60).is_success
        until(lambda: not list(server.registry))
    done = {(method, path) for method, path, status in statuses if status == 200}
    assert len(done) >= 5, done
