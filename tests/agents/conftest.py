"""Fixtures: a tiny engine, and where agents are installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")
pytest.importorskip("prometheus_client", reason="needs the extra serve")

from tests.support.tiny_server import checkpoint  # noqa: E402
from torch_armllm.llm.async_llm import AsyncLLM  # noqa: E402


@pytest.fixture(scope="module")
def tiny_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    folder = checkpoint(tmp_path_factory.mktemp("tiny"))
    llm = AsyncLLM(str(folder), kv_cache_memory=4 << 20, progress=False)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="session")
def agents_folder(pytestconfig: pytest.Config) -> Path:
    """The folder of installed agents, which stays for the next run."""
    return pytestconfig.cache.mkdir("agents")
