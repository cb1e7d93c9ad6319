"""The served models, which can be loaded and unloaded while the server runs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torch_armllm.engine.reports.trace import TraceFile
from torch_armllm.llm.async_llm import AsyncLLM
from torch_armllm.lora.request import LoRARequest
from torch_armllm.server.client_limits import ClientLimits
from torch_armllm.server.errors import ApiError
from torch_armllm.server.metrics import ServerMetrics
from torch_armllm.server.restarts import MissingEngine, RestartLimit
from torch_armllm.server.served_model import ServedModel
from torch_armllm.server.settings import ModelSettings, ServerSettings
from torch_armllm.server.speech_model import SpeechModel
from torch_armllm.server.worker_thread import run_in_worker_thread
from torch_armllm.speech.transcriber import Transcriber
from torch_armllm.system.allocator import release_free_memory

T = TypeVar("T")

logger = logging.getLogger(__name__)

_LAST_RESPONSES = 5.0
"""Seconds in which the requests of a failed engine get their errors before it is closed."""


class ModelRegistry:
    """The served models by name, and removed ones that still finish their requests.

    Args:
        settings: settings of the server.
        engine: default arguments of `torch_armllm.LLM` for all models.  With ``trace``, the steps of all
            models are tracks of one file.

    Attributes:
        metrics: metrics of all models.
        speech: the models that transcribe, by name; they stay as long as the server runs.
    """

    def __init__(self, settings: ServerSettings, engine: Mapping[str, Any] | None = None) -> None:
        self.settings = settings
        self.metrics = ServerMetrics()
        self.speech: dict[str, SpeechModel] = {}
        self._clients = ClientLimits(settings.max_requests_per_key, settings.max_tokens_per_minute)
        self._engine = dict(engine or {})
        trace_path = self._engine.pop("trace", None)
        self._trace = TraceFile(trace_path) if trace_path else None
        self._served: dict[str, ServedModel | MissingEngine] = {}
        self._restart_limit = RestartLimit(settings.max_restarts, settings.restart_window)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: list[ServedModel] = []
        self._without_engine: list[ServedModel] = []  # their requests wait for the next engine, or use it
        self._load_lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    def __iter__(self) -> Iterator[ServedModel]:
        return (served for served in self._served.values() if isinstance(served, ServedModel))

    @property
    def missing(self) -> list[ApiError]:
        """The answers of models whose engines were taken down after a failure."""
        return [served.error() for served in self._served.values() if isinstance(served, MissingEngine)]

    @property
    def num_active(self) -> int:
        """Sequences of all requests that have not ended."""
        served = [*self, *self._draining, *self._without_engine, *self.speech.values()]
        return sum(each.admission.num_admitted for each in served)

    def find(self, name: str | None) -> ServedModel:
        """Returns a model by its name; None: the model that was loaded first.

        Raises:
            ApiError: there is no such model, or its engine is being rebuilt.
        """
        if name is None and self._served:
            name = next(iter(self._served))
        if name in self.speech or (name is None and self.speech):
            name = next(iter(self.speech)) if name is None else name
            text = f"the model {name!r} transcribes: send audio to /v1/audio/transcriptions"
            raise ApiError(400, text, "model", "wrong_kind_of_model")
        if name not in self._served:
            adapters = (adapter for served in self for adapter in served.adapters)
            available = ", ".join(map(repr, (*self._served, *adapters))) or "none"
            message = "no model is loaded" if name is None else f"the model {name[:200]!r} does not exist"
            raise ApiError(404, f"{message}; available models: {available}", "model", "model_not_found")
        served = self._served[name]
        if isinstance(served, MissingEngine):
            raise served.error()
        return served

    def find_with_adapter(self, name: str | None) -> tuple[ServedModel, LoRARequest | None]:
        """Returns the model of a name, or the model and the adapter of that name; see `find`."""
        if name is not None and name not in self._served:
            for served in self:
                if name in served.adapters:
                    return served, served.adapters[name]
        return self.find(name), None

    async def load_adapter(self, name: str, path: str, model: str | None) -> tuple[ServedModel, LoRARequest]:
        """Loads an adapter of a model; None: the model that was loaded first.

        Raises:
            ValueError: it does not fit the model.
            ApiError: there is no such model, or another one has the adapter's name.
        """
        async with self._load_lock:
            if name in (*self._served, *self.speech) or any(name in served.adapters for served in self):
                text = f"the name {name!r} is in use; give another lora_name, or unload the adapter first"
                raise ApiError(400, text, "lora_name", "name_in_use")
            served = self.find(model)
            return served, await served.load_adapter(name, path)

    async def unload_adapter(self, name: str) -> None:
        """Serves an adapter no longer.

        Raises:
            ApiError: there is no such adapter.
        """
        served = next((served for served in self if name in served.adapters), None)
        if served is None:
            raise ApiError(404, f"the adapter {name!r} does not exist", "lora_name", "model_not_found")
        await served.unload_adapter(name)

    def find_speech(self, name: str | None) -> SpeechModel:
        """Returns a model that transcribes by its name; None: the first.

        Raises:
            ApiError: there is no such model, or it does not transcribe.
        """
        if name is None and self.speech:
            name = next(iter(self.speech))
        if name in self.speech:
            return self.speech[name]
        available = ", ".join(map(repr, self.speech)) or "none"
        does_not = f"the model {(name or '')[:200]!r} does not "
        if name in self._served:
            text = f"{does_not}transcribe; models that do: {available}"
            raise ApiError(400, text, "model", "wrong_kind_of_model")
        raise ApiError(
            404, f"{does_not}exist; models that transcribe: {available}", "model", "model_not_found"
        )

    def add_speech(self, transcriber: Transcriber, name: str, source: str) -> SpeechModel:
        """Serves a model that transcribes."""
        served = self.speech[name] = SpeechModel(
            name, source, transcriber, self.settings, self.metrics, self._clients
        )
        return served

    def load_llm(self, model: ModelSettings) -> AsyncLLM:
        """Loads a model without serving it; see `register`.

        Raises:
            ValueError: a setting does not fit the model or the memory.
            OSError: the checkpoint does not exist.
        """
        trace = self._trace.track(model.name) if self._trace else None
        promised = sum(served.llm.promised_bytes for served in [*self, *self._draining])
        engine = {"progress": False, "trace": trace, **self._engine, **model.engine}
        if model.reasoning_parser is not None:
            given = engine.get("reasoning_config") or {}
            engine["reasoning_config"] = {"reasoning_parser": model.reasoning_parser, **given}
        llm = AsyncLLM(model.source, promised_memory=promised, **engine)
        try:
            for number, (name, path) in enumerate(model.adapters.items(), 1):  # the numbers of `ServedModel`
                asyncio.run(llm.add_lora(LoRARequest(name, number, path)))
        except BaseException:
            llm.shutdown()
            raise
        return llm

    def register(self, llm: AsyncLLM, model: ModelSettings) -> ServedModel | None:
        """Starts to serve a model, and returns the previous model of that name."""
        previous = self._served.get(model.name)
        served = self._served[model.name] = ServedModel(
            llm, model, self.settings, self.metrics, self._clients
        )
        self._watch(served)
        return previous if isinstance(previous, ServedModel) else None

    def watch(self) -> None:
        """Rebuilds engines that fail from now on, in the running event loop, if the settings say so."""
        self._loop = asyncio.get_running_loop()
        for served in self:
            self._watch(served)

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
        served = self.find(name)
        del self._served[name]
        await self._run_shielded(self._drain_and_close(served))

    def end_requests(self) -> None:
        """Ends all requests with a 503 error, because the server exits."""
        for served in [*self, *self._draining, *self._without_engine, *self.speech.values()]:
            served.end_requests()

    def close(self) -> None:
        """Shuts down all models; running requests fail."""
        for served in [*self, *self._draining, *self.speech.values()]:
            served.close()

    async def _load(self, model: ModelSettings) -> ServedModel:
        async with self._load_lock:
            llm = await run_in_worker_thread(self.load_llm, model)
            if (previous := self.register(llm, model)) is not None:
                self._start_task(self._drain_and_close(previous))
            logger.info("serving %s", model.name)
            return self.find(model.name)

    def _watch(self, served: ServedModel) -> None:
        if self._loop is not None and self.settings.restart:
            served.llm.on_end(partial(_call_soon, self._loop, self._engine_ended, served))
            if served.llm.replicas is not None:
                served.llm.replicas.on_end(partial(_call_soon, self._loop, self._replica_ended, served))

    def _engine_ended(self, served: ServedModel) -> None:
        if served.will_restart:
            self._start_task(self._restart(served))

    def _replica_ended(self, served: ServedModel, number: int) -> None:
        self._start_task(self._restart_replica(served, number))

    async def _restart_replica(self, served: ServedModel, number: int) -> None:
        """Starts a replica that has ended once more; the others serve meanwhile."""
        name = served.name
        async with self._load_lock:
            while served.engine.llm is not None and not served.llm.errored:
                if not self._restart_limit.take():
                    served.give_up()
                    logger.error("replica %d of %s stays dead", number, name)
                    return
                logger.error("starting replica %d of %s again", number, name)
                assert served.llm.replicas is not None
                try:
                    await run_in_worker_thread(served.llm.replicas.restart, number)
                except Exception:  # of any kind: the others serve until the next try
                    logger.exception("replica %d of %s was not started", number, name)
                    self.metrics.restarts.labels(name, "error").inc()
                else:
                    self.metrics.restarts.labels(name, "success").inc()
                    return

    async def _restart(self, served: ServedModel) -> None:
        """Replaces a failed engine by a new one; requests get a 503 meanwhile."""
        name = served.name
        async with self._load_lock:
            if self._served.get(name) is not served:  # unloaded, or replaced
                return
            if not self._restart_limit.take():
                served.give_up()
                most, window = self.settings.max_restarts, self.settings.restart_window
                logger.error("%s stays dead: %d restarts in %g s", name, most, window)
                return
            logger.error("rebuilding the engine of %s", name)
            missing = self._served[name] = MissingEngine()
            model = replace(served.model_settings, adapters=_folders(served))
            await self._take_down(served)
            await run_in_worker_thread(_free_memory)  # for the new engine
            if await self._rebuild(model):
                served.follow(self.find(name))
            else:
                missing.gave_up = True
                served.give_up()

    async def _rebuild(self, model: ModelSettings) -> bool:
        """Loads and serves a model; tries again as long as the limit allows it."""
        while True:
            try:
                self.register(await run_in_worker_thread(self.load_llm, model), model)
            except Exception:  # of any kind: requests wait for the next try
                logger.exception("the engine of %s was not rebuilt", model.name)
                self.metrics.restarts.labels(model.name, "error").inc()
                if not self._restart_limit.take():
                    return False
            else:
                self.metrics.restarts.labels(model.name, "success").inc()
                logger.warning("the engine of %s was rebuilt", model.name)
                return True

    async def _take_down(self, served: ServedModel) -> None:
        """Closes a failed engine, after its requests have got their errors."""
        with contextlib.suppress(asyncio.TimeoutError):  # a client may not read its error
            await asyncio.wait_for(served.engine.unused.wait(), _LAST_RESPONSES)
        llm = served.llm
        await run_in_worker_thread(served.take_down)
        for earlier in self._without_engine:  # their requests used it, too
            if earlier.engine.llm is llm:
                earlier.engine.clear()
        served.metrics.detach()
        self._without_engine.append(served)
        self._start_task(self._close_idle(served))

    async def _close_idle(self, served: ServedModel) -> None:
        """Waits for the last request of a model whose engine was taken down."""
        await served.idle.wait()
        self._without_engine.remove(served)
        served.prompts.close()
        served.engine.clear()

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


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: the server has exited
        loop.call_soon_threadsafe(callback, *args)


def _folders(served: ServedModel) -> dict[str, str]:
    return {name: adapter.lora_path for name, adapter in served.adapters.items()}


def _free_memory() -> None:
    gc.collect()
    release_free_memory()
