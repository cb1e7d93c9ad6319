"""A replica on a Ray cluster: the server's application, called with requests that the front relays."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from torch_armllm.serve_ray.relayed_request import RelayedRequest
from torch_armllm.server.app import build_app
from torch_armllm.server.model_registry import ModelRegistry
from torch_armllm.server.settings import ModelSettings, ServerSettings

Answer = tuple[int, list[tuple[bytes, bytes]]] | bytes
"""First the status and the headers of a response, then pieces of its body."""


class ModelReplica:
    """Loads a model and answers requests.

    Args:
        name: of the model in the API.
        source: a checkpoint's folder or hub name, which the machine of the replica can read.
        engine: settings of the engine; see `torch_armllm.LLM`.
        max_queue: sequences that may wait.

    Raises:
        ValueError: a setting does not fit the model or the memory.
        OSError: the checkpoint does not exist.
    """

    def __init__(self, name: str, source: str, engine: dict[str, Any], max_queue: int) -> None:
        self._registry = ModelRegistry(ServerSettings(max_queue=max_queue), {"progress": False, **engine})
        model = ModelSettings(name, source)
        self._llm = self._registry.load_llm(model)
        self._registry.register(self._llm, model)
        self._app = build_app(self._registry)

    async def relay(self, request: RelayedRequest) -> AsyncGenerator[Answer, None]:
        """Yields the status and the headers of a response, then its body.

        Closing the generator ends the request.
        """
        answers: asyncio.Queue[Answer | None] = asyncio.Queue()
        left = asyncio.Event()
        sent = False

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": request.body, "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                answers.put_nowait((message["status"], list(message.get("headers", ()))))
            elif body := message.get("body"):
                answers.put_nowait(body)

        async def run() -> None:
            try:
                await self._app(_scope(request), receive, send)
            finally:
                answers.put_nowait(None)

        running = asyncio.ensure_future(run())
        try:
            while (answer := await answers.get()) is not None:
                yield answer
            await running
        finally:
            left.set()
            with contextlib.suppress(Exception):  # of a client that has left
                await asyncio.wait_for(running, 5)

    async def check_health(self) -> None:
        """Raises if the engine has stopped: Ray Serve replaces the replica then."""
        await self._llm.check_health()


def _scope(request: RelayedRequest) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": request.method,
        "path": request.path,
        "raw_path": request.path.encode(),
        "root_path": "",
        "query_string": request.query,
        "headers": request.headers,
        "client": None,
        "server": None,
    }
