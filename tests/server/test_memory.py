"""Memory that a server gives back."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from torch_armllm.server import run
from torch_armllm.server.model_registry import ModelRegistry
from torch_armllm.server.settings import ServerSettings


def test_freed_memory_is_returned_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    times = 0

    def release() -> None:
        nonlocal times
        times += 1
        if times == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(run, "_TRIM_INTERVAL", 0.01)
    monkeypatch.setattr(run, "release_free_memory", release)
    asyncio.run(run.serve(ModelRegistry(ServerSettings()), run.listen("127.0.0.1", 0, 10.0)))
    assert times >= 3
