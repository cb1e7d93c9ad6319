"""A served model: an engine with its prompts, limits and metrics."""

from __future__ import annotations

import asyncio
import copy
import itertools
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

from torch_armllm.chat_format.format import ChatFormat
from torch_armllm.chat_format.model_format import ModelFormat
from torch_armllm.engine.errors import ReplicaFailedError
from torch_armllm.engine.media.media_budget import release_media
from torch_armllm.engine.outputs import RequestOutput
from torch_armllm.engine.sampling_params import RequestOutputKind, SamplingParams
from torch_armllm.engine.text.prompt_limit import PromptLimit
from torch_armllm.llm.async_llm import AsyncLLM, EngineDeadError, RequestAbortedError, StepFailedError
from torch_armllm.llm.beam_search import BeamSearchParams
from torch_armllm.lora.request import LoRARequest
from torch_armllm.pooling.inputs import by_length
from torch_armllm.pooling.outputs import PoolingOutput, PoolingRequestOutput
from torch_armllm.pooling.pooling_engine import PoolingEngine
from torch_armllm.pooling.pooling_model import PoolingInput
from torch_armllm.server.client_limits import ClientLimits
from torch_armllm.server.engine_slot import EngineSlot
from torch_armllm.server.errors import ApiError, bad_request
from torch_armllm.server.metrics import RequestMetrics, ServerMetrics, record_pooled
from torch_armllm.server.middleware.limits import RETRY_AFTER, Admission
from torch_armllm.server.prompts import PromptBuilder
from torch_armllm.server.repeated_outputs import DifferentOutputError, RepeatedOutputs
from torch_armllm.server.restarts import engine_dead, engine_restarting
from torch_armllm.server.served_format import served_format
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
        chat_format: how the model writes reasoning and tool calls.
        clients: limits of the server's clients.
        created: time of loading, in seconds since 1970.
        engine: the place of the engine, shared by the views of the model.
        idle: set while no request holds the model.
        max_model_len: most tokens of a prompt and its output together.
        metrics: metrics of this model.
        name: the model's name in requests.
        pools: true if the model pools, and does not generate.
        prompts: tokenizes texts and chat messages.
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
        self.engine = EngineSlot(llm)
        self.pools = llm.pooling_engine is not None
        self._seeds = random.Random(model_settings.engine.get("seed", 0))
        self.model_settings = model_settings
        self.name = model_settings.name
        self.adapter: LoRARequest | None = None
        self.adapters: dict[str, LoRARequest] = {}
        self._adapter_ids = itertools.count(1)
        for name, path in model_settings.adapters.items():
            self.adapters[name] = self._new_adapter(name, path)
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
            None if self.pools else lambda: self.llm.picture_reader(),
            llm.media_access,
            model_settings.content_format,
        )
        self.chat_format = (
            ModelFormat(ChatFormat())
            if self.pools
            else served_format(llm.get_tokenizer(), self.prompts.template, model_settings)
        )
        self.metrics = metrics.for_model(model_settings.name, llm.all_stats)

    @property
    def llm(self) -> AsyncLLM:
        """The engine.

        Raises:
            EngineDeadError: it was taken down after a failure, and no other has followed.
        """
        if self.engine.llm is None:
            raise EngineDeadError("the engine was taken down")
        return self.engine.llm

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
        with self._dead_errors():
            await self.llm.add_lora(adapter)
        self.adapters[name] = adapter
        return adapter

    async def unload_adapter(self, name: str) -> None:
        """Serves an adapter no longer, and unloads it; one in use leaves its slot when another needs it."""
        adapter = self.adapters.pop(name)
        with self._dead_errors(), suppress(ValueError):  # in use, or unloaded to make room
            await self.llm.remove_lora(adapter.lora_int_id)

    def _new_adapter(self, name: str, path: str) -> LoRARequest:
        return LoRARequest(name, next(self._adapter_ids), path)

    @property
    def pooling(self) -> PoolingEngine | None:
        """The engine of a pooling model; None: the model generates."""
        return self.llm.pooling_engine

    @property
    def keeps_budgets(self) -> bool:
        """True if the engine knows how the model marks its reasoning."""
        return self.llm.keeps_budgets

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
        self,
        prompt: dict[str, Any],
        params: SamplingParams,
        request_id: str,
        priority: int = 0,
        beams: BeamSearchParams | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields a request's outputs; closing the generator aborts the request.

        With `beams` there is one output, of a beam search, which is not computed again.

        Where engines that fail are rebuilt, the next engine computes a request again, once, and its outputs
        go on behind those that were yielded; so does another replica for one that has ended.

        Raises:
            ApiError: the request is invalid or took too long, or the engine is dead.
        """
        request_metrics = RequestMetrics(self.metrics, params)
        again = self.settings.restart or self.llm.replicas is not None
        if again and params.seed is None:  # the next engine has to draw the same tokens
            params = replace(params, seed=self._seeds.randrange(1 << 63))
        charged = len(prompt.get("prompt_token_ids", ()))
        self.clients.charge(charged)
        try:
            with self._tracked(request_id):
                given = prompt, params, request_id, priority
                found = self._outputs(*given) if beams is None else self._found(*given, beams)
                async with aclosing(found) as outputs:
                    async for output in outputs:
                        request_metrics.record(output)
                        if not again:
                            release_media(prompt)  # the engine has read them
                        # the tokens of media are known when the engine has read them
                        self.clients.charge(len(output.prompt_token_ids) - charged)
                        charged = len(output.prompt_token_ids)
                        self.clients.charge(sum(len(completion.token_ids) for completion in output.outputs))
                        if output.finished and (reason := self._ended.get(request_id)):
                            raise reason
                        yield output
        finally:
            release_media(prompt)
            request_metrics.close()

    async def _found(
        self,
        prompt: dict[str, Any],
        params: SamplingParams,
        request_id: str,
        priority: int,
        beams: BeamSearchParams,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the output of a beam search, as a request of `params` has it."""
        given = request_id, beams, self.adapter, priority, max(0, params.logprobs or 0)
        with self.engine.used():
            async with aclosing(self.llm.beam_search(prompt, *given)) as outputs:
                async for output in outputs:
                    # the other beams were computed, too
                    self.clients.charge(sum(len(each.token_ids) for each in output.outputs[params.n :]))
                    output.outputs = output.outputs[: params.n]
                    if params.logprobs is None:
                        for completion in output.outputs:
                            completion.logprobs = None
                    yield output

    async def _outputs(
        self, prompt: dict[str, Any], params: SamplingParams, request_id: str, priority: int
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the outputs of the engine, and of the next one if it fails."""
        repeated = RepeatedOutputs(params.output_kind is RequestOutputKind.DELTA)
        given = prompt, params, request_id, priority
        number = self.engine.number
        try:
            async with aclosing(self._of_engine(*given, self.adapter, repeated)) as outputs:
                async for output in outputs:
                    yield output
            return
        except ReplicaFailedError:
            is_dead = False
        except EngineDeadError:
            if not self.will_restart:
                raise
            is_dead = True
        if is_dead:
            await self.engine.follower(number, request_id)
        repeated.again()
        # a request that made the engine fail may do so again: it is not computed a third time
        adapter = None if self.adapter is None else self.adapters[self.adapter.lora_name]
        async with aclosing(self._of_engine(*given, adapter, repeated)) as outputs:
            async for output in outputs:
                yield output

    async def _of_engine(
        self,
        prompt: dict[str, Any],
        params: SamplingParams,
        request_id: str,
        priority: int,
        adapter: LoRARequest | None,
        repeated: RepeatedOutputs,
    ) -> AsyncGenerator[RequestOutput, None]:
        with self.engine.used():
            async with aclosing(self.llm.generate(prompt, params, request_id, priority, adapter)) as outputs:
                async for output in outputs:
                    if (rest := repeated.rest(output)) is not None:
                        yield rest

    async def encode(
        self, inputs: Sequence[PoolingInput], request_id: str, priority: int = 0
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Pools the inputs of a request, and returns an output for each; canceling it aborts them.

        The engine gets as many at a time as it pools together, so that other requests come in between.

        Raises:
            ApiError: the request took too long, or the engine is dead.
        """
        self.clients.charge(sum(len(each.token_ids) for each in inputs))
        outputs: dict[int, PoolingRequestOutput[PoolingOutput]] = {}
        order, most = by_length(inputs), self.admission.max_running
        try:
            with self._tracked(request_id), self.engine.used():
                for begin in range(0, len(order), most):
                    part = order[begin : begin + most]
                    given = [inputs[index] for index in part]
                    found = await self.llm.encode_batch(given, request_id, priority)
                    outputs.update(zip(part, found, strict=True))
            return [outputs[index] for index in range(len(inputs))]
        finally:
            record_pooled(self.metrics, list(outputs.values()), len(inputs))

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
        except DifferentOutputError as error:
            raise ApiError(500, str(error), code="different_output") from error
        except StepFailedError as error:
            raise ApiError(500, str(error), code="step_failed") from error
        except ReplicaFailedError as error:  # a second one of the request, or no other is left
            raise engine_restarting() if self.settings.restart else engine_dead() from error
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
        with self._dead_errors():
            return await self.llm.between_steps(work)

    @contextmanager
    def _dead_errors(self) -> Iterator[None]:
        try:
            yield
        except EngineDeadError as error:
            raise self.dead_error() from error

    @property
    def will_restart(self) -> bool:
        """True if the engine has failed and will be rebuilt."""
        engine = self.engine.llm
        return self.settings.restart and not self.engine.gave_up and (engine is None or engine.failed)

    def check_replicas(self) -> None:
        """Checks that replicas run.

        Raises:
            ApiError: one has ended and is not started again, or none is left.
        """
        replicas = self.llm.replicas
        if replicas is None or not (dead := replicas.dead):
            return
        if self.settings.restart and not self.engine.gave_up:
            if len(dead) == len(replicas.replicas):
                raise engine_restarting()
            return
        raise ApiError(503, f"{'; '.join(dead)}; restart the server", code="engine_dead")

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
        remedy = "send fewer texts" if self.pools else "lower max_tokens"
        message = f"the request took more than {self.settings.request_timeout:g} seconds; {remedy}"
        self._end(request_id, ApiError(504, message, code="timeout"))

    def _end(self, request_id: str, reason: ApiError) -> None:
        self._ended.setdefault(request_id, reason)
        self.engine.end(reason, request_id)
        if self.engine.llm is None:
            return
        aborting = asyncio.ensure_future(self.llm.abort(request_id))
        self._aborting.add(aborting)
        aborting.add_done_callback(self._aborting.discard)

    def give_up(self) -> None:
        """Ends all requests that wait for another engine, as none will follow."""
        self.engine.gave_up = True
        self.engine.end(engine_dead())

    def follow(self, served: ServedModel) -> None:
        """Lets waiting requests go on in the engine of the model that follows this one."""
        self.adapters.clear()
        self.adapters.update(served.adapters)  # their numbers are others
        self.engine.put(served.llm)

    def take_down(self) -> None:
        """Shuts down an engine that has failed, and forgets it; requests wait for another."""
        self.llm.shutdown()
        self.engine.clear()

    def close(self) -> None:
        """Shuts down the engine and its threads; running requests fail."""
        self.prompts.close()
        if self.engine.llm is not None:
            self.engine.llm.shutdown()
