"""A served model: an engine with its prompts, limits and metrics."""

from __future__ import annotations

import asyncio
import copy
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import Any, TypeVar

from torch_armllm.engine.outputs import RequestOutput
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.text.prompt_limit import PromptLimit
from torch_armllm.engine.text.reasoning_tags import reasoning_tags
from torch_armllm.llm.async_llm import AsyncLLM, EngineDeadError, RequestAbortedError, StepFailedError
from torch_armllm.lora.request import LoRARequest
from torch_armllm.pooling.outputs import PoolingOutput, PoolingRequestOutput
from torch_armllm.pooling.pooling_engine import PoolingEngine
from torch_armllm.pooling.pooling_model import PoolingInput
from torch_armllm.server.client_limits import ClientLimits
from torch_armllm.server.errors import ApiError, bad_request
from torch_armllm.server.metrics import RequestMetrics, ServerMetrics, record_pooled
from torch_armllm.server.middleware.limits import RETRY_AFTER, Admission
from torch_armllm.server.prompts import PromptBuilder
from torch_armllm.server.restarts import engine_dead, engine_restarting
from torch_armllm.server.settings import ModelSettings, ServerSettings

T = TypeVar("T")


class ServedModel:
    """One model of the server.

    Args:
        llm: the engine.
        model_settings: the model's settings.
        settings: settings of the server.
        metrics: metrics of the server.
        clients: limits of the server's clients.

    Attributes:
        adapter: that this view of the model generates with; None: the model alone.
        adapters: the model's adapters by their names in requests.
        admission: counts running and waiting sequences.
        clients: limits of the server's clients.
        created: time of loading, in seconds since 1970.
        gave_up: true once no restart of the failed engine is tried.
        idle: set while no request holds the model.
        max_model_len: most tokens of a prompt and its output together.
        metrics: metrics of this model.
        name: the model's name in requests.
        prompts: tokenizes texts and chat messages.
        reasoning: tags of the model's reasoning; None if it is not parted from answers.
        vocab_size: number of token ids.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        model_settings: ModelSettings,
        settings: ServerSettings,
        metrics: ServerMetrics,
        clients: ClientLimits,
    ) -> None:
        self.llm = llm
        self.model_settings = model_settings
        self.name = model_settings.name
        self.adapter: LoRARequest | None = None
        self.adapters: dict[str, LoRARequest] = {}
        self._adapter_ids = itertools.count(1)
        for name, path in model_settings.adapters.items():
            self.adapters[name] = self._new_adapter(name, path)
        self.gave_up = False
        self.idle = asyncio.Event()
        self.idle.set()
        self._num_requests = 0
        self._running: set[str] = set()
        self._ended: dict[str, ApiError] = {}  # reasons by request
        self._aborting: set[asyncio.Future[None]] = set()
        self.settings = settings
        self.created = int(time.time())
        self.max_model_len = llm.max_model_len
        self.vocab_size = llm.vocab_size
        self.defaults = llm.get_default_sampling_params()
        self.admission = Admission(llm.max_num_seqs, settings.max_queue, clients)
        self.clients = clients
        self.prompts = PromptBuilder(
            llm.get_tokenizer(),
            model_settings.chat_template,
            PromptLimit(llm.get_tokenizer(), llm.max_model_len),
            None if llm.pooling_engine is not None else llm.picture_reader,
            llm.media_access,
            model_settings.content_format,
        )
        self.reasoning = reasoning_tags(
            model_settings.reasoning_parser, self.prompts.template, llm.get_tokenizer().get_vocab()
        )
        self.metrics = metrics.for_model(model_settings.name, llm.stats)

    def acquire(self) -> None:
        """Keeps the model loaded for a request; see `release`."""
        self._num_requests += 1
        self.idle.clear()

    def release(self) -> None:
        """Ends a request's hold on the model."""
        self._num_requests -= 1
        assert self._num_requests >= 0
        if not self._num_requests:
            self.idle.set()

    def with_adapter(self, adapter: LoRARequest) -> ServedModel:
        """Returns a view of this model that has the name of an adapter, and generates with it."""
        view = copy.copy(self)
        view.name, view.adapter = adapter.lora_name, adapter
        return view

    async def load_adapter(self, name: str, path: str) -> LoRARequest:
        """Loads an adapter between two steps, and serves it.

        Raises:
            ValueError: it cannot be read or does not fit the model, or the engine has no room for adapters.
            ApiError: the engine is dead.
        """
        adapter = self._new_adapter(name, path)
        if self.pooling is not None:
            raise ValueError(f"the model {self.name!r} pools; adapters are for models that generate")
        await self.between_steps(lambda: self.llm.llm_engine.add_lora(adapter))
        self.adapters[name] = adapter
        return adapter

    async def unload_adapter(self, name: str) -> None:
        """Serves an adapter no longer, and unloads it; one in use leaves its slot when another needs it."""
        adapter = self.adapters.pop(name)

        def unload() -> None:
            with suppress(ValueError):  # in use, or unloaded to make room
                self.llm.llm_engine.remove_lora(adapter.lora_int_id)

        await self.between_steps(unload)

    def _new_adapter(self, name: str, path: str) -> LoRARequest:
        return LoRARequest(name, next(self._adapter_ids), path)

    @property
    def pooling(self) -> PoolingEngine | None:
        """The engine of a pooling model; None: the model generates."""
        return self.llm.pooling_engine

    @property
    def keeps_budgets(self) -> bool:
        """True if the engine knows how the model marks its reasoning."""
        return self.pooling is None and self.llm.llm_engine.sampler.knows_reasoning

    def check_tokens(self, tokens: Sequence[int], param: str, generates: bool = True) -> None:
        """Checks the number of tokens and their ids.

        Args:
            tokens: token ids of an input.
            param: the request field that holds the input.
            generates: True if at least one output token must fit after the input.

        Raises:
            ApiError: the input is empty or too long, or contains an unknown token id.
        """
        most = self.max_model_len - generates
        if not 0 < len(tokens) <= most:
            raise ApiError(
                400,
                f"this input has {len(tokens)} tokens; it must have 1 to {most} tokens "
                f"(max_model_len is {self.max_model_len})",
                param,
            )
        if max(tokens) >= self.vocab_size:
            message = f"token id {max(tokens)} is out of range: the model's ids end at {self.vocab_size - 1}"
            raise ApiError(400, message, param)

    async def generate(
        self, prompt: dict[str, Any], params: SamplingParams, request_id: str, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields a request's outputs; closing the generator aborts the request.

        Raises:
            ApiError: the request is invalid or took too long, or the engine is dead.
        """
        request_metrics = RequestMetrics(self.metrics, params)
        given = prompt, params, request_id, priority, self.adapter
        charged = len(prompt.get("prompt_token_ids", ()))
        self.clients.charge(charged)
        try:
            with self._tracked(request_id):
                async with aclosing(self.llm.generate(*given)) as outputs:
                    async for output in outputs:
                        request_metrics.record(output)
                        # the tokens of pictures are known when the engine has read them
                        self.clients.charge(len(output.prompt_token_ids) - charged)
                        charged = len(output.prompt_token_ids)
                        self.clients.charge(sum(len(completion.token_ids) for completion in output.outputs))
                        if output.finished and (reason := self._ended.get(request_id)):
                            raise reason
                        yield output
        finally:
            request_metrics.close()

    async def encode(
        self, inputs: Sequence[PoolingInput], request_id: str, priority: int = 0
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Pools the inputs of a request, and returns an output for each; canceling it aborts them.

        Raises:
            ApiError: the request took too long, or the engine is dead.
        """
        self.clients.charge(sum(len(each.token_ids) for each in inputs))
        outputs: list[PoolingRequestOutput[PoolingOutput]] = []
        try:
            with self._tracked(request_id):
                outputs = await self.llm.encode_batch(inputs, request_id, priority)
            return outputs
        finally:
            record_pooled(self.metrics, outputs, len(inputs))

    @contextmanager
    def _tracked(self, request_id: str) -> Iterator[None]:
        """Ends a request that takes too long, and turns errors of the engine into those of the API."""
        seconds = self.settings.request_timeout
        timer = asyncio.get_running_loop().call_later(seconds, self._end_late, request_id)
        self._running.add(request_id)
        try:
            yield
        except RequestAbortedError as error:
            raise self._ended.get(request_id) or bad_request(error) from error
        except (ValueError, ImportError) as error:
            raise bad_request(error) from error
        except StepFailedError as error:
            raise ApiError(500, str(error), code="step_failed") from error
        except EngineDeadError as error:
            raise self.dead_error() from error
        finally:
            timer.cancel()
            self._running.discard(request_id)
            self._ended.pop(request_id, None)

    async def between_steps(self, work: Callable[[], T]) -> T:
        """Runs ``work`` in the engine's thread between two steps; all requests wait for it.

        Raises:
            ApiError: the engine is dead.
        """
        try:
            return await self.llm.between_steps(work)
        except EngineDeadError as error:
            raise self.dead_error() from error

    @property
    def will_restart(self) -> bool:
        """True if the engine has failed and will be rebuilt."""
        return self.settings.restart and not self.gave_up and self.llm.failed

    def dead_error(self) -> ApiError:
        """Returns the answer to requests after the engine has stopped."""
        return engine_restarting() if self.will_restart else engine_dead()

    def end_requests(self) -> None:
        """Ends all requests with a 503 error, because the server exits."""
        for request_id in self._running:
            headers = {"Retry-After": str(RETRY_AFTER)}
            self._end(
                request_id, ApiError(503, "the server exits; try again later", None, "exiting", headers)
            )

    def _end_late(self, request_id: str) -> None:
        remedy = "lower max_tokens" if self.pooling is None else "send fewer texts"
        message = f"the request took more than {self.settings.request_timeout:g} seconds; {remedy}"
        self._end(request_id, ApiError(504, message, code="timeout"))

    def _end(self, request_id: str, reason: ApiError) -> None:
        self._ended.setdefault(request_id, reason)
        aborting = asyncio.ensure_future(self.llm.abort(request_id))
        self._aborting.add(aborting)
        aborting.add_done_callback(self._aborting.discard)

    def close(self) -> None:
        """Shuts down the engine and its threads; running requests fail."""
        self.prompts.close()
        self.llm.shutdown()
