"""A model that is served, and what all routes share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import Request

from torch_armllm.async_llm import AsyncLLM, EngineDeadError
from torch_armllm.engine.outputs import RequestOutput
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.server.conversations import Conversations
from torch_armllm.server.errors import ApiError, bad_request
from torch_armllm.server.limits import Admission
from torch_armllm.server.metrics import Metrics, Watch
from torch_armllm.server.settings import ServerSettings


class Serving:
    """One model behind the routes.

    Args:
        llm: what answers.
        settings: of the server.

    Attributes:
        admission: counts what is being answered.
        conversations: makes prompts of texts and messages.
        created: when it was loaded, in seconds since 1970.
        max_model_len: most tokens of a prompt and its answer.
        metrics: of its requests.
        vocabulary: how many tokens it has.
    """

    def __init__(self, llm: AsyncLLM, settings: ServerSettings) -> None:
        engine = llm.llm_engine
        self.llm = llm
        self.settings = settings
        self.created = int(time.time())
        self.max_model_len = engine.intake.max_model_len
        self.vocabulary: int = llm.model.get_input_embeddings().num_embeddings
        self.defaults = llm.get_default_sampling_params()
        self.admission = Admission(engine.scheduler.config.max_num_seqs, settings.max_queue)
        self.conversations = Conversations(llm.get_tokenizer(), settings.chat_template)
        self.metrics = Metrics(settings.name, engine.stats)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError unless a client asks for this model, or for none by name."""
        if name is not None and name != self.settings.name:
            text = f"there is no model {name[:200]!r}; this server has {self.settings.name!r}"
            raise ApiError(404, text, "model", "model_not_found")

    def check_tokens(self, tokens: Sequence[int], param: str, answered: bool = True) -> None:
        """Raises ApiError where a text cannot be read.

        Args:
            tokens: of the text.
            param: of the request, where the text stands.
            answered: whether there has to be room for a token behind it.
        """
        most = self.max_model_len - answered
        if not 0 < len(tokens) <= most:
            raise ApiError(
                400,
                f"a text may have 1 to {most} tokens here (max_model_len is {self.max_model_len}); "
                f"this one has {len(tokens)}",
                param,
            )
        if max(tokens) >= self.vocabulary:
            raise ApiError(400, f"the model's token ids end at {self.vocabulary - 1}", param)

    async def generate(
        self, prompt: dict[str, Any], params: SamplingParams, request_id: str, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """A request's outputs; closing the generator ends the request.

        Raises:
            ApiError: it cannot be served, took too long, or the engine does not run.
        """
        late = asyncio.Event()
        seconds = self.settings.request_timeout
        timer = asyncio.get_running_loop().call_later(seconds, self._end_late, request_id, late)
        watch = Watch(self.metrics, params)
        try:
            async with aclosing(self.llm.generate(prompt, params, request_id, priority)) as outputs:
                async for output in outputs:
                    watch.see(output)
                    if late.is_set() and output.finished:
                        raise ApiError(504, f"the answer took more than {seconds:g} seconds", code="timeout")
                    yield output
        except (ValueError, ImportError) as error:
            raise bad_request(error) from error
        except EngineDeadError as error:
            raise ApiError(503, "the engine does not run any more", code="engine_dead") from error
        finally:
            timer.cancel()
            watch.close()

    def _end_late(self, request_id: str, late: asyncio.Event) -> None:
        late.set()
        self._aborting = asyncio.ensure_future(self.llm.abort(request_id))


def serving_of(request: Request) -> Serving:
    """The model that a request's server has."""
    serving: Serving = request.app.state.serving
    return serving
