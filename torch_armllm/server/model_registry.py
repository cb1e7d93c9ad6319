"""The served models, which can be loaded and unloaded while the server runs."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any, TypeVar

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from torch_armllm.engine.trace import TraceFile
from torch_armllm.llm.async_llm import AsyncLLM
from torch_armllm.server.errors import ApiError
from torch_armllm.server.metrics import ServerMetrics
from torch_armllm.server.served_model import ServedModel
from torch_armllm.server.settings import ModelSettings, ServerSettings
from torch_armllm.server.worker_thread import run_in_worker_thread
from torch_armllm.system.allocator import release_free_memory

T = TypeVar("T")

logger = logging.getLogger(__name__)

_LEASED = "torch_armllm.leased_models"
"""Key of an ASGI scope's list of leased models."""


class ModelRegistry:
    """The served models by name, and removed ones that still finish their requests.

    Args:
        settings: settings of the server.
        engine: default arguments of `torch_armllm.LLM` for all models.  With ``trace``, the steps of all
            models are tracks of one file.

    Attributes:
        metrics: metrics of all models.
    """

    def __init__(self, settings: ServerSettings, engine: Mapping[str, Any] | None = None) -> None:
        self.settings = settings
        self.metrics = ServerMetrics()
        self._engine = dict(engine or {})
        trace_path = self._engine.pop("trace", None)
        self._trace = TraceFile(trace_path) if trace_path else None
        self._served: dict[str, ServedModel] = {}
        self._draining: list[ServedModel] = []
        self._load_lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._served.values())

    @property
    def num_active(self) -> int:
        """Sequences of all requests that have not ended."""
        return sum(served.admission.num_admitted for served in [*self, *self._draining])

    def find(self, name: str | None) -> ServedModel:
        """Returns a model by its name; None: the model that was loaded first.

        Raises:
            ApiError: there is no such model.
        """
        if name is None and self._served:
            return next(iter(self))
        if name not in self._served:
            available = ", ".join(map(repr, self._served)) or "none"
            message = "no model is loaded" if name is None else f"the model {name[:200]!r} does not exist"
            raise ApiError(404, f"{message}; available models: {available}", "model", "model_not_found")
        return self._served[name]

    def load_llm(self, model: ModelSettings) -> AsyncLLM:
        """Loads a model without serving it; see `register`.

        Raises:
            ValueError: a setting does not fit the model or the memory.
            OSError: the checkpoint does not exist.
        """
        trace = self._trace.track(model.name) if self._trace else None
        promised = sum(served.llm.kv_bytes for served in [*self, *self._draining])
        engine = {"progress": False, "trace": trace, **self._engine, **model.engine}
        return AsyncLLM(model.source, promised_memory=promised, **engine)

    def register(self, llm: AsyncLLM, model: ModelSettings) -> ServedModel | None:
        """Starts to serve a model, and returns the previous model of that name."""
        previous = self._served.get(model.name)
        self._served[model.name] = ServedModel(llm, model, self.settings, self.metrics)
        return previous

    async def load(self, model: ModelSettings) -> ServedModel:
        """Loads and serves a model; the previous model of that name finishes its requests first.

        Models are loaded one at a time, while the others keep serving.  Loading completes even if the caller
        is cancelled.

        Raises:
            ValueError: a setting does not fit the model or the memory.
            OSError: the checkpoint does not exist.
        """
        return await self._run_shielded(self._load(model))

    async def unload(self, name: str) -> None:
        """Stops serving a model at once, and frees its memory when its requests have finished.

        Raises:
            ApiError: there is no such model.
        """
        self.find(name)
        await self._run_shielded(self._drain_and_close(self._served.pop(name)))

    def end_requests(self) -> None:
        """Ends all requests with a 503 error, because the server exits."""
        for served in [*self, *self._draining]:
            served.end_requests()

    def close(self) -> None:
        """Shuts down all models; running requests fail."""
        for served in [*self, *self._draining]:
            served.close()

    async def _load(self, model: ModelSettings) -> ServedModel:
        async with self._load_lock:
            llm = await run_in_worker_thread(self.load_llm, model)
            if (previous := self.register(llm, model)) is not None:
                self._start_task(self._drain_and_close(previous))
            logger.info("serving %s", model.name)
            return self._served[model.name]

    async def _drain_and_close(self, served: ServedModel) -> None:
        """Waits for a model's last request, then frees its memory."""
        name = served.name
        self._draining.append(served)
        await served.idle.wait()
        await run_in_worker_thread(served.close)
        self._draining.remove(served)
        served.metrics.close()
        del served
        await run_in_worker_thread(_free_memory)
        logger.info("unloaded %s", name)

    async def _run_shielded(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.shield(self._start_task(work))

    def _start_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class ModelLeases:
    """ASGI middleware that releases a request's models after its response was sent.

    Args:
        app: the application; it leases models with `lease_model`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        leased: list[ServedModel] = []
        scope[_LEASED] = leased
        try:
            await self._app(scope, receive, send)
        finally:
            for served in leased:
                served.release()


def registry_of(request: Request) -> ModelRegistry:
    """Returns the model registry of a request's server."""
    registry: ModelRegistry = request.app.state.registry
    return registry


def lease_model(request: Request, name: str | None) -> ServedModel:
    """Returns the model that a request names, and keeps it loaded until the response was sent.

    Raises:
        ApiError: there is no such model.
    """
    served = registry_of(request).find(name)
    served.acquire()
    request.scope[_LEASED].append(served)
    return served


def _free_memory() -> None:
    gc.collect()
    release_free_memory()
