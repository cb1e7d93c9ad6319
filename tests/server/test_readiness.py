"""Signals that arrive as soon as a server says that it is ready."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from torch_armllm.server import run
from torch_armllm.server.model_registry import ModelRegistry
from torch_armllm.server.settings import ServerSettings


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_handled_before_a_server_is_ready(number: signal.Signals) -> None:
    def send() -> None:
        os.kill(os.getpid(), number)

    listening = run.listen("127.0.0.1", 0, 10.0)
    asyncio.run(run.serve(ModelRegistry(ServerSettings()), listening, send))
    listening.close()
