"""A model that is served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from torch_armllm.engine.outputs import RequestOutput
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.llm.async_llm import AsyncLLM, EngineDeadError, StepFailedError
from torch_armllm.server.errors import ApiError, bad_request
from torch_armllm.server.metrics import Metrics, Watch
from torch_armllm.server.middleware.limits import Admission
from torch_armllm.server.prompts import Conversations
from torch_armllm.server.settings import ModelSettings, ServerSettings


class Serving:
    """One model behind the routes.

    Args:
        llm: what answers.
        model: what was decided on for it.
        settings: of the server.
        metrics: of the server.

    Attributes:
        admission: counts what is being answered.
        conversations: makes prompts of texts and messages.
        created: when it was loaded, in seconds since 1970.
        max_model_len: most tokens of a prompt and its answer.
        metrics: of its requests.
        name: as clients ask for it.
        unused: whether no request holds it.
        vocabulary: how many tokens it has.
    """

    def __init__(
        self, llm: AsyncLLM, model: ModelSettings, settings: ServerSettings, metrics: Metrics
    ) -> None:
        engine = llm.llm_engine
        self.llm = llm
        self.model = model
        self.name = model.name
        self.unused = asyncio.Event()
        self.unused.set()
        self._users = 0
        self.settings = settings
        self.created = int(time.time())
        self.max_model_len = engine.preprocessor.max_model_len
        self.vocabulary = llm.vocabulary
        self.defaults = llm.get_default_sampling_params()
        self.admission = Admission(engine.scheduler.config.max_num_seqs, settings.max_queue)
        self.conversations = Conversations(llm.get_tokenizer(), model.chat_template)
        self.metrics = metrics.of(model.name, engine.stats)

    def hold(self) -> None:
        """Keeps it for a request; see `release`."""
        self._users += 1
        self.unused.clear()

    def release(self) -> None:
        """A request was answered to the end."""
        self._users -= 1
        assert self._users >= 0
        if not self._users:
            self.unused.set()

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
        except StepFailedError as error:
            raise ApiError(500, str(error), code="step_failed") from error
        except EngineDeadError as error:
            raise ApiError(503, "the engine does not run any more", code="engine_dead") from error
        finally:
            timer.cancel()
            watch.close()

    def _end_late(self, request_id: str, late: asyncio.Event) -> None:
        late.set()
        self._aborting = asyncio.ensure_future(self.llm.abort(request_id))

    def close(self) -> None:
        """Ends the engine and its threads; requests that run get an error."""
        self.conversations.close()
        self.llm.shutdown()
