"""The models of a server, which come and go while it runs."""

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
from torch_armllm.server.metrics import Metrics
from torch_armllm.server.served_model import Serving
from torch_armllm.server.settings import ModelSettings, ServerSettings
from torch_armllm.server.worker_thread import in_own_thread
from torch_armllm.system.allocator import release_free_memory

T = TypeVar("T")

logger = logging.getLogger(__name__)

_HELD = "torch_armllm.models"


class Models:
    """Those that can be asked, by name, and those that finish what they were asked before.

    Args:
        settings: of the server.
        engine: arguments of `torch_armllm.LLM` for models that do not say otherwise; with ``trace``, the
            steps of all models are tracks of one file.

    Attributes:
        metrics: of all.
    """

    def __init__(self, settings: ServerSettings, engine: Mapping[str, Any] | None = None) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self._engine = dict(engine or {})
        place = self._engine.pop("trace", None)
        self._trace = TraceFile(place) if place else None
        self._served: dict[str, Serving] = {}
        self._leaving: list[Serving] = []
        self._one_at_a_time = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    def __iter__(self) -> Iterator[Serving]:
        return iter(self._served.values())

    @property
    def held(self) -> int:
        """Answers that are being made."""
        return sum(serving.admission.held for serving in [*self, *self._leaving])

    def find(self, name: str | None) -> Serving:
        """A model by its name; none: the one that is there for the longest time.

        Raises:
            ApiError: there is no such model.
        """
        if name is None and self._served:
            return next(iter(self))
        if name not in self._served:
            own = ", ".join(map(repr, self._served)) or "none"
            what = "a model" if name is None else f"the model {name[:200]!r}"
            raise ApiError(404, f"{what} is not here; this server has {own}", "model", "model_not_found")
        return self._served[name]

    def read(self, model: ModelSettings) -> AsyncLLM:
        """Loads a model.  It does not count yet: see `add`.

        Args:
            model: which, and how.

        Raises:
            ValueError: a setting does not fit the model or the memory.
            OSError: there is no such checkpoint.
        """
        trace = self._trace.track(model.name) if self._trace else None
        promised = sum(map(_promised, [*self, *self._leaving]))
        engine = {"progress": False, "trace": trace, **self._engine, **model.engine}
        return AsyncLLM(model.source, promised_memory=promised, **engine)

    def add(self, llm: AsyncLLM, model: ModelSettings) -> Serving | None:
        """Serves a model from now on, and gives the one that had its name before."""
        before = self._served.get(model.name)
        self._served[model.name] = Serving(llm, model, self.settings, self.metrics)
        return before

    async def load(self, model: ModelSettings) -> Serving:
        """Loads a model while others answer, one at a time; one of the same name finishes what it was asked.

        What was begun is done, whether or not somebody waits for it.

        Raises:
            ValueError: a setting does not fit the model or the memory.
            OSError: there is no such checkpoint.
        """
        return await self._surely(self._load(model))

    async def unload(self, name: str) -> None:
        """Takes a model away: at once from those that can be asked, and its memory when it has answered.

        Raises:
            ApiError: there is no such model.
        """
        self.find(name)
        await self._surely(self._let_go(self._served.pop(name)))

    def close(self) -> None:
        """Ends all models; requests that run get an error."""
        for serving in [*self, *self._leaving]:
            serving.close()

    async def _load(self, model: ModelSettings) -> Serving:
        async with self._one_at_a_time:
            llm = await in_own_thread(self.read, model)
            if (before := self.add(llm, model)) is not None:
                self._begin(self._let_go(before))
            logger.info("serving %s", model.name)
            return self._served[model.name]

    async def _let_go(self, serving: Serving) -> None:
        """Waits for a model's last answer, then frees its memory."""
        name = serving.name
        self._leaving.append(serving)
        await serving.unused.wait()
        await in_own_thread(serving.close)
        self._leaving.remove(serving)
        serving.metrics.close()
        del serving
        await in_own_thread(_free)
        logger.info("%s is gone", name)

    async def _surely(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.shield(self._begin(work))

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class Leases:
    """Holds the models that a request asks for until its response was sent to the end.

    Args:
        app: what answers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        held: list[Serving] = []
        scope[_HELD] = held
        try:
            await self._app(scope, receive, send)
        finally:
            for serving in held:
                serving.release()


def models_of(request: Request) -> Models:
    """The models that a request's server has."""
    models: Models = request.app.state.models
    return models


def serving_of(request: Request, name: str | None) -> Serving:
    """The model that a request asks for, which stays until the request was answered.

    Raises:
        ApiError: there is no such model.
    """
    serving = models_of(request).find(name)
    serving.hold()
    request.scope[_HELD].append(serving)
    return serving


def _promised(serving: Serving) -> int:
    """Bytes of a model's keys and values."""
    cache = getattr(serving.llm.llm_engine.runner, "cache", ())
    return sum(tensor.nbytes for tensor in cache if tensor is not None)


def _free() -> None:
    gc.collect()
    release_free_memory()
