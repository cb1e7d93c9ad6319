"""Fixtures: a tiny model, its engine and a running server."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")
pytest.importorskip("prometheus_client", reason="needs the extra serve")
httpx = pytest.importorskip("httpx", reason="needs the extra test")
pytest.importorskip("openai", reason="needs the extra test")

from tests.support.server_live import Live, live  # noqa: E402
from tests.support.tiny_server import checkpoint  # noqa: E402
from torch_armllm.llm.async_llm import AsyncLLM  # noqa: E402

# httpx gives up after 5 s by default, which a busy machine may need for one answer.
_timeout = inspect.signature(httpx.get).parameters["timeout"].default
_timeout.connect = _timeout.read = _timeout.write = _timeout.pool = 60.0


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def packed_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with packed weights."""
    return checkpoint(tmp_path_factory.mktemp("packed"), packed=True)


@pytest.fixture
def stored_plans(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `packed_checkpoint` be captured once, however often a test loads it."""
    monkeypatch.setenv("ARMLLM_PLAN_CACHE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp()))


@pytest.fixture(scope="session")
def tiny_llm(tiny_checkpoint: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(str(tiny_checkpoint), kv_cache_memory=4 << 20, max_num_seqs=16, progress=False)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def server(tiny_llm: AsyncLLM) -> Iterator[Live]:
    with live(tiny_llm) as running:
        yield running
