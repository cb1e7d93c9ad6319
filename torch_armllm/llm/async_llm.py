"""`AsyncLLM`: streamed outputs for any number of coroutines."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import Unpack

from torch_armllm.engine.disk.session_files import SessionFiles
from torch_armllm.engine.engine_thread import EngineDeadError, EngineThread, OutputStream, PauseMode
from torch_armllm.engine.errors import RequestAbortedError, StepFailedError
from torch_armllm.engine.outputs import RequestOutput
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.text.preprocess import NewRequest, Prompt
from torch_armllm.engine.text.tokenization import Tokenization
from torch_armllm.llm.base import LLMBase, check_sleep_level
from torch_armllm.llm.beam_search import BeamSearch, BeamSearchParams, as_request_output
from torch_armllm.llm.calls.call_arguments import ForeignArguments, ForeignPoolingArguments, check_arguments
from torch_armllm.lora.adapter_table import PreparedAdapter
from torch_armllm.lora.request import LoRARequest
from torch_armllm.ops.untraced import call_at_end
from torch_armllm.pooling.inputs import by_length
from torch_armllm.pooling.outputs import PoolingOutput, PoolingRequestOutput
from torch_armllm.pooling.pooling_engine import PoolingRequest
from torch_armllm.pooling.pooling_model import PoolingInput
from torch_armllm.pooling.pooling_params import PoolingParams, PoolingTask, chosen_task
from torch_armllm.system.panics import PANICS_AS_ERRORS

T = TypeVar("T")

__all__ = ["AsyncLLM", "EngineDeadError", "RequestAbortedError", "StepFailedError"]


class AsyncLLM(LLMBase):
    """A model that serves many concurrent requests and streams their outputs.

    The engine runs in its own thread, which sleeps while there is nothing to do.  Coroutines of several event
    loops may use it.

    Args:
        model: see `torch_armllm.LLM`, as for all other arguments.
        tokenizer: see there.
        dtype: see there.
        quantization: see there.
        skip_tokenizer_init: see there.
        progress: see there.
        settings: see there.

    Attributes:
        llm_engine: the engine; only the engine's thread may use it.
    """

    def _start(self) -> None:
        self._thread = EngineThread(self._engine)
        self._engine.on_failure(self._thread.end)
        self._waiting: dict[str, asyncio.Future[PreparedAdapter | None]] = {}  # requests for their adapters
        self._asleep = False
        self._searches: set[str] = set()  # beam searches that are not aborted
        self._batches: dict[str, tuple[list[str], OutputStream]] = {}
        self._tokenizing = ThreadPoolExecutor(1, "armllm-tokenizer")
        self._reading = ThreadPoolExecutor(1, "armllm-adapters")
        pools = self._tokenizing, self._reading
        self._end = call_at_end(self, _end, self._thread, pools, self._engine.close)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str = "",
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **others: Unpack[ForeignArguments],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generates a completion and yields its output after every step, until it has finished.

        Closing the generator, or canceling the task that waits for it, aborts the request.  A slow reader
        skips outputs whose content newer outputs repeat; with ``output_kind=RequestOutputKind.DELTA`` none is
        skipped.

        Args:
            prompt: a text, tokens, ``{"prompt": …}`` or ``{"prompt_token_ids": …}``.
            sampling_params: None: `get_default_sampling_params`.
            request_id: unique among running requests; empty: a new id.
            priority: lower values run first.
            lora_request: the adapter that computes it; None: the model alone.
            tokenization_kwargs: see `torch_armllm.LLM.generate`, as for the further arguments.
            others: see there.

        Raises:
            ValueError: the model pools, or the adapter cannot be loaded, or the request can never be served,
                or its id is in use.
            RequestAbortedError: `abort` was called while the adapter was read.
            StepFailedError: a step with this request failed; the engine continues.
            ReplicaFailedError: the replica that computed this request has ended; the others continue.
            EngineDeadError: the engine failed, or was shut down.
        """
        check_arguments("generate", others)
        if self.pooling_engine is not None:
            raise ValueError("this model pools: call encode, or load it with runner='generate'")
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        stream = OutputStream(params)
        name = request_id or f"request-{uuid.uuid4().hex}"
        self._thread.check()
        how = Tokenization.of(tokenization_kwargs)
        if not how.is_plain or (isinstance(prompt, str) and self._tokenizer is not None):
            read = PANICS_AS_ERRORS(self.llm_engine.preprocessor.tokenized)
            prompt = await stream.loop.run_in_executor(self._tokenizing, read, prompt, how, params.max_tokens)
        prepared = None if lora_request is None else await self._prepared(lora_request, name)
        self._thread.add(NewRequest(name, prompt, params, priority, lora_request, prepared), stream)
        finished = False
        try:
            while not finished:
                output: RequestOutput = await stream.get()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._thread.abort(name, stream)

    async def beam_search(
        self,
        prompt: Prompt,
        request_id: str = "",
        params: BeamSearchParams | None = None,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        logprobs: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Finds the most probable completions of a prompt, and yields its only output, the best first.

        Args:
            prompt: see `generate`; pictures are not taken.
            request_id: see `generate`.
            params: width and length of the search; it ends earlier where `max_model_len` ends it.
            lora_request: see `generate`.
            priority: see `generate`.
            logprobs: number of best tokens whose log-probabilities are returned per position, at least.

        Raises:
            ValueError: there are no parameters, or see `generate`, as for the other errors.
            RequestAbortedError: `abort` was called.
        """
        self._check_generates("beam searches")
        if params is None:
            raise ValueError("a beam search needs params: give BeamSearchParams(beam_width, max_tokens)")
        name = request_id or f"request-{uuid.uuid4().hex}"
        if name in self._searches:
            raise ValueError(f"a request with the id {name!r} is running; give another id")
        self._thread.check()
        loop, preprocessor = asyncio.get_running_loop(), self.llm_engine.preprocessor
        tokens = list(await loop.run_in_executor(self._tokenizing, preprocessor.token_ids, prompt))
        search = BeamSearch([tokens], params, self.eos_token_ids, logprobs)
        most = min(params.max_tokens, max(1, self.max_model_len - len(tokens)))
        first: RequestOutput | None = None
        self._searches.add(name)
        try:
            while search.beams and most:
                outputs = await self._beam_step(name, search, priority, lora_request)
                search.advance(outputs)
                first, most = first or outputs[0], most - 1
        finally:
            self._searches.discard(name)
        assert first is not None
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, Mapping):
            text = prompt.get("prompt")
        (found,) = search.finish()
        decode = None if self._tokenizer is None else self._tokenizer.decode
        yield as_request_output(name, text, tokens, found, first, decode)

    async def _beam_step(
        self, name: str, search: BeamSearch, priority: int, lora_request: LoRARequest | None
    ) -> list[RequestOutput]:
        """Returns an output of one token for each beam."""

        async def one(number: int, beam: list[int]) -> RequestOutput:
            given = f"{name}-{number}", priority, lora_request
            async for output in self.generate(beam, search.step, *given):
                found = output
            if name not in self._searches:
                raise RequestAbortedError(f"the request {name!r} was aborted")
            return found

        steps = [asyncio.ensure_future(one(*each)) for each in enumerate(search.beams)]
        try:
            return list(await asyncio.gather(*steps))
        finally:
            for step in steps:
                step.cancel()
            await asyncio.gather(*steps, return_exceptions=True)

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str = "",
        priority: int = 0,
        *,
        pooling_task: PoolingTask | None = None,
        **others: Unpack[ForeignPoolingArguments],
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Pools a text, and yields its only output; see `LLM.encode`.

        Raises:
            ValueError: the model generates, or the text or a parameter does not fit it.
            RequestAbortedError: `abort` was called.
            StepFailedError: the batch of the text failed; the engine continues.
            EngineDeadError: the engine failed, or was shut down.
        """
        check_arguments("encode", others)
        engine = self.pooling_engine
        if engine is None:
            raise ValueError("this model generates: load it with runner='pooling' to encode")
        params = PoolingParams() if pooling_params is None else pooling_params
        task = chosen_task(pooling_task, [params], engine.model.tasks)
        self._thread.check()
        loop = asyncio.get_running_loop()
        build = PANICS_AS_ERRORS(engine.inputs.build)
        one = await loop.run_in_executor(self._tokenizing, build, prompt, task, params)
        for output in await self.encode_batch([one], request_id, priority):
            yield output

    async def encode_batch(
        self, inputs: Sequence[PoolingInput], request_id: str = "", priority: int = 0
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Pools the inputs of one request, and returns an output for each, in their order.

        Canceling the task that waits for it aborts the request.

        Args:
            inputs: built by the engine's `InputBuilder`.
            request_id: unique among running requests; empty: a new id.
            priority: lower values run first.

        Raises:
            RequestAbortedError: see `encode`, as for the other errors.
        """
        stream = OutputStream(None)
        request_id = request_id or f"request-{uuid.uuid4().hex}"
        if request_id in self._batches:
            raise ValueError(f"a request with the id {request_id!r} is running; give another id")
        names = [f"{request_id}-{index}" for index in range(len(inputs))]
        self._thread.check()
        self._batches[request_id] = names, stream
        done: dict[str, PoolingRequestOutput[PoolingOutput]] = {}
        try:
            for index in by_length(inputs):
                self._thread.add(PoolingRequest(names[index], inputs[index], priority), stream)
            while len(done) < len(inputs):
                output = await stream.get()
                done[output.request_id] = output
            return [done[name] for name in names]
        finally:
            del self._batches[request_id]
            for name in names:
                if name not in done:
                    self._thread.abort(name, stream)

    async def abort(self, request_id: str) -> None:
        """Aborts a request.

        Its generator yields the output so far, with ``finish_reason`` ``abort``; a request that pools, or
        whose adapter is still being read, raises `RequestAbortedError`.
        """
        if (reading := self._waiting.pop(request_id, None)) is not None:
            reading.get_loop().call_soon_threadsafe(reading.cancel)
            return
        if request_id in self._searches:
            self._searches.discard(request_id)  # the search ends at its next token
            return
        if (batch := self._batches.get(request_id)) is not None:
            error = RequestAbortedError(f"the request {request_id!r} was aborted")
            batch[1].loop.call_soon_threadsafe(batch[1].put, error)
            return
        self._thread.abort(request_id)

    async def between_steps(self, work: Callable[[], T]) -> T:
        """Runs ``work`` in the engine's thread between two steps; all requests wait for it.

        Raises:
            EngineDeadError: the engine failed, or was shut down.
        """
        return await asyncio.wrap_future(self._thread.call(work))

    async def check_health(self) -> None:
        """Returns if the engine runs.

        Raises:
            EngineDeadError: the engine failed, or was shut down.
        """
        self._thread.check()

    async def pause_generation(self, *, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Computes nothing until `resume_generation`; requests that come meanwhile wait for it.

        Args:
            mode: of the running requests: ``abort`` ends them, ``wait`` waits until they have finished, and
                ``keep`` lets them continue later.
            clear_cache: forgets the prefix cache, unless requests are kept.

        Raises:
            ValueError: the mode is unknown, or the model pools.
            EngineDeadError: the engine failed, or was shut down.
        """
        if mode not in ("abort", "wait", "keep"):
            raise ValueError(f"mode is {mode!r}: give abort, wait or keep")
        self._check_generates("pauses")
        await asyncio.wrap_future(self._thread.pause(mode))
        if clear_cache and mode != "keep":
            await self.reset_prefix_cache()

    async def resume_generation(self) -> None:
        """Ends the pause of `pause_generation`; requests that waited are computed."""
        await self.between_steps(self._thread.resume)

    async def sleep(self, level: int = 1, *, mode: PauseMode = "abort") -> None:
        """Pauses, and gives the memory of the KV cache back to the system until `wake_up`.

        Requests that come meanwhile wait for it.

        Args:
            level: 1; the weights stay. vLLM's level 2 discards them, too: make another `AsyncLLM` for that.
            mode: of the running requests, ``abort`` or ``wait``; see `pause_generation`.

        Raises:
            ValueError: the level or the mode is another, the model pools, or requests are kept by a pause.
            EngineDeadError: the engine failed, or was shut down.
        """
        check_sleep_level(level)
        if mode == "keep":
            raise ValueError("mode is 'keep', and sleep gives the cache of kept requests back: give wait")
        await self.pause_generation(mode=mode)
        if not await self.reset_prefix_cache():
            raise ValueError("a pause keeps requests, whose cache sleep would give back: let them end first")
        await self.between_steps(self.llm_engine.release_cache)
        self._asleep = True

    async def wake_up(self) -> None:
        """Ends `sleep`: prompts are computed again."""
        self._asleep = False
        await self.resume_generation()

    async def is_sleeping(self) -> bool:
        """Returns True between `sleep` and `wake_up`."""
        return self._asleep

    async def is_paused(self) -> bool:
        """Returns True between `pause_generation` and `resume_generation`."""
        return self._thread.paused

    async def reset_prefix_cache(self) -> bool:
        """Forgets the prefix cache in memory; returns False, and changes nothing, while requests run."""
        self._check_generates("prefix caches")
        return await self.between_steps(self.llm_engine.reset_prefix_cache)

    def _check_generates(self, what: str) -> None:
        if self.pooling_engine is not None:
            raise ValueError(f"this model pools, and {what} are of models that generate")

    async def save_session(self, path: str | PathLike[str], prompt: Prompt) -> None:
        """Saves what is computed of a conversation, between two steps; see `torch_armllm.LLM.save_session`.

        What is not in the prefix cache any more is computed first, beside other requests.
        """
        files = self._session_files()
        loop = asyncio.get_running_loop()
        read = PANICS_AS_ERRORS(self.llm_engine.preprocessor.token_ids)
        token_ids = await loop.run_in_executor(self._tokenizing, read, prompt)
        if not await self.between_steps(lambda: files.holds(token_ids)):
            async for _ in self.generate(token_ids, SamplingParams(max_tokens=1)):
                pass
        await self.between_steps(lambda: files.save(Path(path), token_ids))

    async def load_session(self, path: str | PathLike[str]) -> list[int]:
        """Loads a conversation, between two steps; see `torch_armllm.LLM.load_session`."""
        files = self._session_files()
        return await self.between_steps(lambda: files.load(Path(path)))

    def _session_files(self) -> SessionFiles:
        self._check_generates("sessions")
        return self._sessions

    async def add_lora(self, lora_request: LoRARequest) -> None:
        """Loads an adapter; see `LLMEngine.add_lora`.

        It is read and checked while requests run, and takes its place between two steps.  Replicas read it
        between two steps.
        """
        prepared = await self._prepared(lora_request)
        await self.between_steps(lambda: self.llm_engine.add_lora(lora_request, prepared))

    async def _prepared(self, lora_request: LoRARequest, request_id: str = "") -> PreparedAdapter | None:
        """Reads an adapter in a thread of its own; None: it is loaded, or replicas read it themselves."""
        if self.llm_engine.has_lora(lora_request):
            return None
        loop = asyncio.get_running_loop()
        reading = loop.run_in_executor(self._reading, self.llm_engine.prepare_lora, lora_request)
        if request_id:
            self._waiting[request_id] = reading
        try:
            return await reading
        except asyncio.CancelledError:
            if request_id and request_id not in self._waiting:  # `abort` took it
                raise RequestAbortedError(f"the request {request_id!r} was aborted") from None
            raise
        finally:
            self._waiting.pop(request_id, None)

    async def remove_lora(self, lora_id: int) -> None:
        """Unloads an adapter between two steps; see `LLMEngine.remove_lora`."""
        await self.between_steps(lambda: self.llm_engine.remove_lora(lora_id))

    def shutdown(self) -> None:
        """Stops the engine's thread; running requests raise `EngineDeadError`."""
        self._end()

    @property
    def errored(self) -> bool:
        """True if the engine has stopped."""
        return self._thread.error is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """The reason why the engine has stopped; None while it runs."""
        return self._thread.error

    @property
    def failed(self) -> bool:
        """True if the engine has stopped because of an error, not by `shutdown`."""
        return self._thread.error is not None and self._thread.error.__cause__ is not None

    def on_end(self, callback: Callable[[], object]) -> None:
        """Calls a function once the engine has stopped, in the engine's thread; at once if it has already."""
        self._thread.ended.add_done_callback(lambda _: callback())


def _end(thread: EngineThread, pools: Sequence[ThreadPoolExecutor], close: Callable[[], object]) -> None:
    thread.stop()
    close()
    for pool in pools:
        pool.shutdown(wait=False)
