"""Handler of text completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from torch_armllm.engine.outputs import CompletionOutput, Logprobs, RequestOutput
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.server.errors import ApiError
from torch_armllm.server.handlers.echoed_prompt import echo_longest
from torch_armllm.server.handlers.logprobs import CompletionLogprobs, TokenDecoder, prompt_logprobs
from torch_armllm.server.handlers.merge_streams import merge_streams
from torch_armllm.server.handlers.sampling_params import beam_search_params, sampling_params, tokenization
from torch_armllm.server.handlers.streaming import Event
from torch_armllm.server.handlers.usage import Usage, without_output
from torch_armllm.server.protocol.completions import CompletionRequest
from torch_armllm.server.served_model import ServedModel

DEFAULT_MAX_TOKENS = 16
"""Output tokens where a request sets no ``max_tokens``; OpenAI's default."""


class CompletionHandler:
    """Handles one completion request.

    Args:
        served: the model.
        body: the request.

    Raises:
        ApiError: the request is invalid.
    """

    def __init__(self, served: ServedModel, body: CompletionRequest) -> None:
        self._served = served
        self._body = body
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._params = self._make_params()
        self._beams = beam_search_params(body, self._params, body.best_of, served.max_model_len)
        self._tokenization, self._most = tokenization(
            body, self._params, served.max_model_len, body.add_special_tokens
        )
        self._prompts = split_prompts(body.prompt)
        self._decode = TokenDecoder(served.prompts.tokenizer, bool(body.return_tokens_as_token_ids))
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._begun: set[int] = set()
        self._usage = Usage()

    @property
    def _echo_only(self) -> bool:
        return self._body.max_tokens == 0

    def _make_params(self) -> SamplingParams:
        body, served = self._body, self._served
        fills = {}
        if body.suffix:
            if body.echo:
                raise ApiError(400, "echo cannot be combined with suffix; leave out one of them", "echo")
            ends = served.prompts.infill("suffix").end_ids
            fills["stop_token_ids"] = [*(body.stop_token_ids or ()), *ends]
        if body.stream and body.best_of not in (None, body.n or 1):
            raise ApiError(400, "best_of must equal n in a stream; leave out best_of or stream", "best_of")
        if body.max_tokens == 0 and not body.echo:
            raise ApiError(400, "max_tokens is 0; give at least 1, or set echo", "max_tokens")
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
        more: dict[str, Any] = {"best_of": body.best_of, "logprobs": body.logprobs, **fills}
        if body.echo and body.logprobs is not None:
            more["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
        return sampling_params(body, served.defaults, max_tokens, served.settings.max_tokens, **more)

    async def complete(self) -> dict[str, Any]:
        """Returns the complete response."""
        choices: list[dict[str, Any]] = []
        async with aclosing(self._outputs()) as outputs:
            async for prompt, output in outputs:
                choices += [self._choice(prompt, output, completion) for completion in output.outputs]
        choices.sort(key=lambda choice: int(choice["index"]))
        return {**self._frame(), "choices": choices, "usage": self._usage_dict()}

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yields the response as stream events."""
        async with aclosing(self._outputs()) as outputs:
            async for prompt, output in outputs:
                for completion in output.outputs:
                    chunk = {**self._frame(), "choices": [self._choice(prompt, output, completion)]}
                    if self._body.wants_usage:
                        always = self._body.wants_usage_always
                        chunk["usage"] = self._chunk_usage(output, completion) if always else None
                    yield chunk
        if self._body.wants_usage:
            yield {**self._frame(), "choices": [], "usage": self._usage_dict()}

    async def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yields the engine's outputs with their prompt's index, after the request was admitted."""
        served, body = self._served, self._body
        with served.admission.admit(self._params.num_sequences * len(self._prompts)):
            prompts = [await self._tokens(prompt) for prompt in self._prompts]
            for prompt in prompts:  # check all of them before the first one starts
                served.check_tokens(prompt["prompt_token_ids"], "prompt", generates=not self._echo_only)
            streams = [
                self._generate(prompt, self._params, f"{self._id}-{index}", body.priority, self._beams)
                for index, prompt in enumerate(prompts)
            ]
            async with aclosing(merge_streams(streams)) as outputs:
                async for index, output in outputs:
                    self._usage.add(output)
                    yield index, output

    def _generate(self, prompt: dict[str, Any], *given: Any) -> AsyncGenerator[RequestOutput, None]:
        fills = self._echo_only and len(prompt["prompt_token_ids"]) == self._served.max_model_len
        return (
            echo_longest(self._served, prompt, *given[:3]) if fills else self._served.generate(prompt, *given)
        )

    async def _tokens(self, prompt: str | list[int]) -> dict[str, Any]:
        if self._body.suffix:
            if not isinstance(prompt, str):
                raise ApiError(400, "suffix needs prompts that are texts", "prompt")
            if self._most is not None:
                message = "truncate_prompt_tokens cannot be combined with suffix; leave out one of them"
                raise ApiError(400, message, "truncate_prompt_tokens")
            return await self._served.prompts.from_infill(prompt, self._body.suffix, (), "", 0)
        if isinstance(prompt, str):
            return await self._served.prompts.from_text(prompt, self._tokenization, self._most)
        prompt = self._tokenization.cut(prompt, self._most)
        text = await self._served.prompts.decode(prompt) if self._body.echo else None
        return {"prompt": text, "prompt_token_ids": prompt}

    def _choice(self, prompt: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        index = prompt * self._params.n + completion.index
        begins = index not in self._begun
        echo = self._body.echo and begins
        self._begun.add(index)
        text = "" if self._echo_only else completion.text
        choice = {
            "index": index,
            "text": (output.prompt or "") + text if echo else text,
            "logprobs": self._choice_logprobs(index, output, completion, echo),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, self._body.prompt_logprobs)
        if self._body.return_token_ids:
            choice["token_ids"] = [] if self._echo_only else completion.token_ids
            if begins:
                choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def _choice_logprobs(
        self, index: int, output: RequestOutput, completion: CompletionOutput, echo: bool
    ) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        tokens: list[int] = []
        logprobs: list[Logprobs | None] = []
        if echo:
            tokens += output.prompt_token_ids
            logprobs += output.prompt_logprobs or []
        if not self._echo_only:
            tokens += completion.token_ids
            logprobs += completion.logprobs or []
        formatter = self._logprobs.setdefault(index, CompletionLogprobs(self._body.logprobs, self._decode))
        return formatter(tokens, logprobs)

    def _chunk_usage(self, output: RequestOutput, completion: CompletionOutput) -> dict[str, int]:
        usage = self._usage.of_choice(output.request_id, completion.index)
        return without_output(usage) if self._echo_only else usage

    def _usage_dict(self) -> dict[str, Any]:
        usage = self._usage.to_dict()
        return without_output(usage) if self._echo_only else usage

    def _frame(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._served.name,
        }


def split_prompts(prompt: Any) -> list[str | list[int]]:
    """Returns the list of a request's prompts; a single text or token list becomes a list of one."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)
