"""`AsyncLLM`: answers as they are written, to any number of coroutines."""

from __future__ import annotations

import asyncio
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from torch_armllm.engine.engine_thread import EngineDeadError, EngineThread, OutputStream
from torch_armllm.engine.failure import StepFailedError
from torch_armllm.engine.intake import Prompt
from torch_armllm.engine.outputs import RequestOutput
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.loaded_model import LoadedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

T = TypeVar("T")

__all__ = ["AsyncLLM", "EngineDeadError", "StepFailedError"]


class AsyncLLM:
    """A model that serves many requests at once, each streamed to whoever asked.

    The engine runs in a thread of its own, which sleeps while there is nothing to do; coroutines of several
    event loops may use it.

    Args:
        model: see `torch_armllm.LLM`, as for all other arguments.
        tokenizer: see there.
        dtype: see there.
        quantization: see there.
        skip_tokenizer_init: see there.
        progress: see there.
        settings: see there.

    Attributes:
        llm_engine: what computes the answers; it belongs to the engine's thread.
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        *,
        dtype: str | torch.dtype = "auto",
        quantization: str | None = "int4",
        skip_tokenizer_init: bool = False,
        progress: bool = True,
        **settings: Any,
    ) -> None:
        self._loaded = LoadedModel(
            model,
            tokenizer,
            dtype=dtype,
            quantization=quantization,
            skip_tokenizer_init=skip_tokenizer_init,
            progress=progress,
            settings=settings,
        )
        self.llm_engine = self._loaded.engine
        self._thread = EngineThread(self.llm_engine)
        self._tokenizing = ThreadPoolExecutor(1, "armllm-tokenizer")
        self._end = weakref.finalize(self, _end, self._thread, self._tokenizing)

    @property
    def model(self) -> PreTrainedModel:
        """The patched model; loading it takes a while where only its plan was kept, see `LLM`."""
        return self._loaded.model

    @property
    def has_model(self) -> bool:
        """Whether the model is there, or only what computes its answers."""
        return self._loaded.has_model

    @property
    def vocabulary(self) -> int:
        """How many tokens the model knows."""
        return self._loaded.vocabulary

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str = "",
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answers a prompt, giving its output again and again, until it is finished.

        Closing the generator, or cancelling who waits for it, ends the request.  A slow reader misses outputs
        whose content newer ones hold too; with ``output_kind=RequestOutputKind.DELTA`` none is missed.

        Args:
            prompt: a text, tokens, ``{"prompt": …}`` or ``{"prompt_token_ids": …}``.
            sampling_params: None: `get_default_sampling_params`.
            request_id: unique among those that run; none: a new one.
            priority: lower ones first.

        Raises:
            ValueError: the request can never be served, or its name is taken.
            StepFailedError: a step that it took part in failed; the engine goes on.
            EngineDeadError: the engine failed, or was shut down.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        stream = OutputStream(params)
        name = request_id or f"request-{uuid.uuid4().hex}"
        self._thread.check()
        if isinstance(prompt, str) and self._loaded.tokenizer_or_none is not None:
            prompt = await stream.loop.run_in_executor(self._tokenizing, self._tokens, prompt)
        self._thread.add(name, stream, prompt, params, priority)
        finished = False
        try:
            while not finished:
                output = await stream.get()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._thread.abort(name, stream)

    async def abort(self, request_id: str) -> None:
        """Ends a request; its generator gives what was written, with ``finish_reason`` ``abort``."""
        self._thread.abort(request_id)

    async def between_steps(self, work: Callable[[], T]) -> T:
        """Does some work with the model in the engine's thread, between two steps; all requests wait for it.

        Raises:
            EngineDeadError: the engine failed, or was shut down.
        """
        return await asyncio.wrap_future(self._thread.call(work))

    def shutdown(self) -> None:
        """Ends the engine's thread; requests that run get an error."""
        self._end()

    @property
    def errored(self) -> bool:
        """Whether the engine does not run any more."""
        return self._thread.error is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the engine does not run any more."""
        return self._thread.error

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of prompts and answers.

        Raises:
            ValueError: the model runs without one.
        """
        return self._loaded.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation config recommends."""
        return self._loaded.default_params

    def _tokens(self, prompt: str) -> dict[str, Any]:
        return {"prompt": prompt, "prompt_token_ids": list(self._loaded.tokenizer(prompt)["input_ids"])}


def _end(thread: EngineThread, tokenizing: ThreadPoolExecutor) -> None:
    thread.stop()
    tokenizing.shutdown(wait=False)
