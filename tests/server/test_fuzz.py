"""Random requests generated from the OpenAPI schema: none causes an internal error or a leak."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.support.server_live import Live, until

schemathesis = pytest.importorskip("schemathesis", reason="needs the extra test")


ROUTES = [f"/v1/{name}" for name in ("chat/completions", "responses", "completions", "embeddings")]
ROUTES += ["/tokenize", "/detokenize"]
MODES = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]


@pytest.fixture(scope="module")
def description(server: Live) -> Any:
    schema = httpx.get(f"{server.base}/openapi.json").json()
    for part in schema["components"]["schemas"].values():  # short outputs, for speed
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n"):
            if name in part.get("properties", {}):
                part["properties"][name] = {"type": "integer", "minimum": 1, "maximum": 3}
                part.setdefault("required", []).append(name)
    return schemathesis.openapi.from_dict(schema)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("path", ROUTES)
def test_random_requests(description: Any, server: Live, path: str, mode: Any) -> None:
    @given(case=description[path]["POST"].as_strategy(generation_mode=mode))
    @settings(
        max_examples=10,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def send(case: Any) -> None:
        got = case.call(base_url=server.base, timeout=30)
        assert got.status_code < 500, got.text
        if got.status_code >= 400:
            assert set(got.json()["error"]) == {"message", "type", "param", "code"}

    send()
    assert not server.llm.errored
    until(lambda: server.idle)
