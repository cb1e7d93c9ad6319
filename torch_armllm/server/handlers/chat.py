"""Handler of chat completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from torch_armllm.chat_format.deltas import OutputDelta
from torch_armllm.engine.outputs import CompletionOutput
from torch_armllm.server.custom_tools import CallStream, custom_call
from torch_armllm.server.errors import ApiError
from torch_armllm.server.handlers.chat_outputs import ChatOutputs
from torch_armllm.server.handlers.logprobs import TokenDecoder, chat_logprobs, prompt_logprobs
from torch_armllm.server.handlers.streaming import Event
from torch_armllm.server.handlers.usage import without_output
from torch_armllm.server.protocol.chat import ChatRequest
from torch_armllm.server.served_model import ServedModel


class ChatHandler:
    """Handles one chat completion request.

    Args:
        served: the model.
        body: the request.

    Raises:
        ApiError: the request is invalid.
    """

    def __init__(self, served: ServedModel, body: ChatRequest) -> None:
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs requires logprobs to be true", "top_logprobs")
        self._served = served
        self._body = body
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._outputs = ChatOutputs(served, body, self._id)
        self._decode = TokenDecoder(served.prompts.tokenizer, bool(body.return_tokens_as_token_ids))
        self._top_logprobs = body.top_logprobs or 0
        self._custom = body.custom_names()
        self._calls = [CallStream(self._custom) for _ in range(self._outputs.params.n)]

    async def complete(self) -> dict[str, Any]:
        """Returns the complete response."""
        choices: list[dict[str, Any]] = []
        async with aclosing(self._outputs()) as outputs:
            async for added in outputs:
                choices = [self._choice(*each) for each in added]
        usage = self._outputs.usage.to_dict()
        return {**self._frame("chat.completion"), "choices": choices, "usage": usage, **self._of_prompt()}

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yields the response as stream events."""
        started = False
        async with aclosing(self._outputs()) as outputs:
            async for added in outputs:
                if not started:
                    started = True
                    for index in range(self._outputs.params.n):
                        yield self._begin(index)
                for each in added:
                    for event in self._deltas(*each):
                        yield event
        if self._body.wants_usage:
            frame = self._frame("chat.completion.chunk")
            yield {**frame, "choices": [], "usage": self._outputs.usage.to_dict()}

    def _begin(self, index: int) -> Event:
        """Returns the first chunk of an output, which comes before its tokens."""
        chunk = {**self._chunk(index, {"role": "assistant", "content": ""}), **self._of_prompt()}
        if usage := chunk.get("usage"):
            chunk["usage"] = without_output(usage)
        return chunk

    def _of_prompt(self) -> dict[str, Any]:
        """Returns what a request asks of its prompt."""
        last, count = self._outputs.last, self._body.prompt_logprobs
        asked: dict[str, Any] = {}
        if last is not None and count is not None:
            asked["prompt_logprobs"] = prompt_logprobs(last.prompt_logprobs, count)
        if last is not None and self._body.return_token_ids:
            asked["prompt_token_ids"] = last.prompt_token_ids
        return asked

    def _token_ids(self, completion: CompletionOutput) -> dict[str, list[int]]:
        return {"token_ids": completion.token_ids} if self._body.return_token_ids else {}

    def _choice(self, completion: CompletionOutput, parsed: OutputDelta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
        message |= self._reasoning(parsed)
        if parsed.reasoning or parsed.calls:
            message["content"] = parsed.content or None
        if parsed.calls:
            calls = (
                custom_call(call) if call.name in self._custom else call.to_delta() for call in parsed.calls
            )
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in calls]
        return {
            "index": completion.index,
            "message": message,
            "logprobs": self._logprobs(completion),
            "finish_reason": self._outputs.choices[completion.index].finish_reason(completion),
            "stop_reason": completion.stop_reason,
            **self._token_ids(completion),
        }

    def _deltas(self, completion: CompletionOutput, parsed: OutputDelta) -> Iterator[Event]:
        logprobs = self._logprobs(completion)
        delta = self._reasoning(parsed)
        if parsed.content:
            delta["content"] = parsed.content
        calls = self._calls[completion.index].deltas(parsed.calls, completion.finished)
        if calls:
            delta["tool_calls"] = calls
        token_ids = self._token_ids(completion)
        if not (delta or logprobs or any(token_ids.values()) or completion.finished):
            return
        if not (delta or completion.finished):
            delta["content"] = ""
        if completion.finished and calls:
            # As OpenAI's server does: its client takes a call for done when a later chunk has no more of it.
            chunk = self._chunk(completion.index, delta, logprobs)
            chunk["choices"][0] |= token_ids
            yield chunk
            delta, logprobs, token_ids = {}, None, {}
        reason = self._outputs.choices[completion.index].finish_reason(completion)
        chunk = self._chunk(completion.index, delta, logprobs, reason)
        chunk["choices"][0] |= token_ids
        if completion.finished:
            chunk["choices"][0]["stop_reason"] = completion.stop_reason
        yield chunk

    def _reasoning(self, parsed: OutputDelta) -> dict[str, Any]:
        """Returns the fields of new reasoning: vLLM has had both names."""
        if not (parsed.reasoning and self._body.include_reasoning):
            return {}
        return {"reasoning_content": parsed.reasoning, "reasoning": parsed.reasoning}

    def _logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        return chat_logprobs(completion.token_ids, completion.logprobs, self._top_logprobs, self._decode)

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> Event:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = {**self._frame("chat.completion.chunk"), "choices": [choice]}
        if self._body.wants_usage:
            always = self._body.wants_usage_always
            chunk["usage"] = self._outputs.usage.of_choice(self._id, index) if always else None
        return chunk

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._served.name}
