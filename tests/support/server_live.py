"""Servers in a thread of the test process, and slowed engines."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch_armllm.engine.outputs import CompletionOutput, RequestOutput
from torch_armllm.engine.sampling_params import RequestOutputKind
from torch_armllm.llm.async_llm import AsyncLLM
from torch_armllm.server.model_registry import ModelRegistry
from torch_armllm.server.run import listen, make_server
from torch_armllm.server.settings import ModelSettings, ServerSettings

NAME = "tiny"


class Live:
    """A running server.

    Attributes:
        base: URL of the server.
        llm: engine of the first model.
        served: the first model.
        registry: all models.
    """

    def __init__(self, llm: AsyncLLM, model: ModelSettings, registry: ModelRegistry) -> None:
        self.llm, self.registry = llm, registry
        settings = registry.settings
        self._socket = listen("127.0.0.1", 0, settings.write_timeout)
        self.port: int = self._socket.getsockname()[1]
        self.base = f"http://127.0.0.1:{self.port}"
        registry.register(llm, model)
        self.served = registry.find(model.name)
        self._server = make_server(registry)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        until(lambda: self._server.started)

    def _run(self) -> None:
        asyncio.run(self._server.serve([self._socket]))

    @property
    def connections(self) -> int:
        return len(self._server.server_state.connections)

    def own_socket(self) -> Any:
        """Returns the server's socket of the only connection."""
        (connection,) = self._server.server_state.connections
        return connection.transport.get_extra_info("socket")  # type: ignore[union-attr]

    @property
    def idle(self) -> bool:
        """True if no request is unfinished or holds KV blocks."""
        engine = self.llm.llm_engine
        blocks = engine.scheduler.blocks
        return not (engine.has_unfinished_requests() or self.served.admission.num_admitted or blocks.usage)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()


@contextmanager
def live(
    llm: AsyncLLM,
    name: str = NAME,
    engine: dict[str, Any] | None = None,
    source: str = "",
    model: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[Live]:
    registry = ModelRegistry(ServerSettings(**{"drain_timeout": 2.0, **settings}), engine)
    server = Live(llm, ModelSettings(name, source, **model or {}), registry)
    del llm  # of tests that wait for its end
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def slowed(llm: AsyncLLM, seconds: float, may_step: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Delays every engine step, and computes none while ``may_step`` says no."""
    engine: Any = llm.llm_engine
    step = engine.step

    def slow() -> Any:
        if not may_step():
            time.sleep(0.001)
            return []
        time.sleep(seconds)
        return step()

    engine.step = slow
    try:
        yield
    finally:
        del engine.step


@contextmanager
def scripted(server: Live, text: str, size: int = 1) -> Iterator[list[Any]]:
    """Makes the model of a server write a text, in pieces of ``size`` tokens.

    Yields:
        A list to which the prompt and the parameters of every request are appended.
    """
    served: Any = server.served
    tokenizer = served.prompts.tokenizer
    asked: list[Any] = []

    async def generate(prompt: Any, params: Any, request_id: str, priority: int = 0, *_: Any) -> Any:
        asked.append((prompt, params))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        whole = params.output_kind is RequestOutputKind.FINAL_ONLY
        skip = params.skip_special_tokens
        if (found := params.text_end) is not None:
            end = found.begin()
            written = (tokenizer.decode([token], skip_special_tokens=skip) for token in ids)
            ids = ids[: next((at for at, word in enumerate(written, 1) if end(word) is not None), len(ids))]
        step = len(ids) if whole else size
        for at in range(0, len(ids), step):
            piece, last = ids[at : at + step], at + step >= len(ids)
            words = tokenizer.decode(piece, skip_special_tokens=skip)
            completion = CompletionOutput(0, words, piece, finish_reason="stop" if last else None)
            given = prompt["prompt"], prompt["prompt_token_ids"]
            yield RequestOutput(request_id, *given, None, [completion], last)

    served.generate = generate
    try:
        yield asked
    finally:
        del served.generate


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "condition not met in time"
        time.sleep(0.005)
