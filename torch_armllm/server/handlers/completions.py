"""Continuations of texts."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from torch_armllm.engine.outputs import CompletionOutput, Logprobs, RequestOutput
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.server.errors import ApiError
from torch_armllm.server.handlers.logprobs import CompletionLogprobs, TokenTexts
from torch_armllm.server.handlers.merge_streams import merged
from torch_armllm.server.handlers.sampling_params import sampling_params
from torch_armllm.server.handlers.streaming import Event
from torch_armllm.server.handlers.usage import Usage
from torch_armllm.server.protocol.completions import CompletionRequest
from torch_armllm.server.served_model import Serving

DEFAULT_TOKENS = 16
"""Of an answer, where nobody says how many; OpenAI's."""


class Completion:
    """Answers one request.

    Args:
        serving: the model.
        body: what the client asks for.

    Raises:
        ApiError: it cannot be served.
    """

    def __init__(self, serving: Serving, body: CompletionRequest) -> None:
        self._serving = serving
        self._body = body
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._params = self._settings()
        self._prompts = several_prompts(body.prompt)
        self._texts = TokenTexts(serving.conversations.tokenizer)
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._echoed: set[int] = set()
        self._usage = Usage()

    @property
    def _only_echo(self) -> bool:
        return self._body.max_tokens == 0

    def _settings(self) -> SamplingParams:
        body, serving = self._body, self._serving
        if body.suffix:
            raise ApiError(400, "this model cannot write towards a suffix", "suffix")
        if body.stream and body.best_of not in (None, body.n or 1):
            raise ApiError(400, "answers cannot be streamed before the best_of them are known", "best_of")
        if body.max_tokens == 0 and not body.echo:
            raise ApiError(400, "max_tokens is 0; allow at least one token, or ask for echo", "max_tokens")
        most = DEFAULT_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
        more = {
            "best_of": body.best_of,
            "logprobs": body.logprobs,
            "prompt_logprobs": body.logprobs if body.echo else None,
        }
        return sampling_params(body, serving.defaults, most, serving.settings.max_tokens, **more)

    async def answer(self) -> dict[str, Any]:
        """The whole answer at once."""
        choices: list[dict[str, Any]] = []
        async with aclosing(self._outputs()) as outputs:
            async for place, output in outputs:
                choices += [self._choice(place, output, answer) for answer in output.outputs]
        choices.sort(key=lambda choice: int(choice["index"]))
        return {**self._frame(), "choices": choices, "usage": self._used()}

    async def events(self) -> AsyncGenerator[Event, None]:
        """The answer in pieces."""
        async with aclosing(self._outputs()) as outputs:
            async for place, output in outputs:
                for answer in output.outputs:
                    chunk = {**self._frame(), "choices": [self._choice(place, output, answer)]}
                    if self._body.wants_usage:
                        chunk["usage"] = None
                    yield chunk
        if self._body.wants_usage:
            yield {**self._frame(), "choices": [], "usage": self._used()}

    async def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """What the engine gives to each prompt, once the request was let in."""
        serving, body = self._serving, self._body
        with serving.admission.admit(self._params.num_sequences * len(self._prompts)):
            prompts = [await self._tokens(prompt) for prompt in self._prompts]
            for prompt in prompts:  # before the first is answered
                serving.check_tokens(prompt["prompt_token_ids"], "prompt")
            running = [
                serving.generate(prompt, self._params, f"{self._id}-{place}", body.priority)
                for place, prompt in enumerate(prompts)
            ]
            async with aclosing(merged(running)) as outputs:
                async for place, output in outputs:
                    self._usage.add(output)
                    yield place, output

    async def _tokens(self, prompt: str | list[int]) -> dict[str, Any]:
        if isinstance(prompt, str):
            return await self._serving.conversations.of_text(prompt)
        text = await self._serving.conversations.text_of(prompt) if self._body.echo else None
        return {"prompt": text, "prompt_token_ids": prompt}

    def _choice(self, place: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        index = place * self._params.n + answer.index
        echo = self._body.echo and index not in self._echoed
        self._echoed.add(index)
        text = "" if self._only_echo else answer.text
        return {
            "index": index,
            "text": (output.prompt or "") + text if echo else text,
            "logprobs": self._told(index, output, answer, echo),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }

    def _told(
        self, index: int, output: RequestOutput, answer: CompletionOutput, echo: bool
    ) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        tokens: list[int] = []
        found: list[Logprobs | None] = []
        if echo:
            tokens += output.prompt_token_ids
            found += output.prompt_logprobs or []
        if not self._only_echo:
            tokens += answer.token_ids
            found += answer.logprobs or []
        teller = self._logprobs.setdefault(index, CompletionLogprobs(self._body.logprobs, self._texts))
        return teller(tokens, found)

    def _used(self) -> dict[str, Any]:
        used = self._usage.to_dict()
        if self._only_echo:
            used |= {"completion_tokens": 0, "total_tokens": used["prompt_tokens"]}
        return used

    def _frame(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._serving.name,
        }


def several_prompts(prompt: Any) -> list[str | list[int]]:
    """A request's prompts: one text or one list of tokens is one."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)
