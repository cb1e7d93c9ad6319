"""Handler of chat completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from torch_armllm.engine.outputs import CompletionOutput
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.server.errors import ApiError
from torch_armllm.server.handlers.logprobs import TokenDecoder, chat_logprobs
from torch_armllm.server.handlers.sampling_params import sampling_params
from torch_armllm.server.handlers.streaming import Event
from torch_armllm.server.handlers.usage import Usage
from torch_armllm.server.protocol.chat import ChatRequest
from torch_armllm.server.served_model import ServedModel
from torch_armllm.server.tools.choice import ToolUse, tool_use
from torch_armllm.server.tools.parser import OutputDelta


class ChatChoice:
    """Parsing state of one of a request's ``n`` outputs."""

    def __init__(self, index: int, use: ToolUse) -> None:
        self.index = index
        self._use = use
        self._parser = use.make_parser()
        self._has_calls = False

    def parse(self, completion: CompletionOutput) -> OutputDelta:
        """Returns the text and the tool calls that an output adds."""
        parsed = self._parser.feed(completion.text)
        if completion.finished:
            remaining = self._parser.finish()
            parsed = OutputDelta(parsed.content + remaining.content, parsed.calls + remaining.calls)
        if not self._use.parallel:
            parsed.calls = [call for call in parsed.calls if call.index == 0]
        self._has_calls = self._has_calls or bool(parsed.calls)
        return parsed

    def finish_reason(self, completion: CompletionOutput) -> str | None:
        """Returns OpenAI's finish reason; None while the output is not finished."""
        if completion.finish_reason == "stop" and self._has_calls:
            return self._use.finish_reason
        return completion.finish_reason


class ChatHandler:
    """Handles one chat completion request.

    Args:
        served: the model.
        body: the request.

    Raises:
        ApiError: the request is invalid.
    """

    def __init__(self, served: ServedModel, body: ChatRequest) -> None:
        self._served = served
        self._body = body
        self._use = tool_use(body, served.prompts.template, served.model_settings.tool_parser)
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._decode = TokenDecoder(served.prompts.tokenizer)
        self._top_logprobs = body.top_logprobs or 0
        self._params = self._make_params()
        self._choices = [ChatChoice(index, self._use) for index in range(self._params.n)]
        self._usage = Usage()

    def _make_params(self) -> SamplingParams:
        body, served = self._body, self._served
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs requires logprobs to be true", "top_logprobs")
        max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        logprobs = self._top_logprobs if body.logprobs else None
        more = {"logprobs": logprobs, **self._use.settings}
        return sampling_params(body, served.defaults, max_tokens, served.settings.max_tokens, **more)

    async def complete(self) -> dict[str, Any]:
        """Returns the complete response."""
        choices: list[dict[str, Any]] = []
        async with aclosing(self._outputs()) as outputs:
            async for completions in outputs:
                choices = [self._choice(completion) for completion in completions]
        return {**self._frame("chat.completion"), "choices": choices, "usage": self._usage.to_dict()}

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yields the response as stream events."""
        started = False
        async with aclosing(self._outputs()) as outputs:
            async for completions in outputs:
                if not started:
                    started = True
                    for choice in self._choices:
                        yield self._chunk(choice.index, {"role": "assistant", "content": ""})
                for completion in completions:
                    if (event := self._delta(completion)) is not None:
                        yield event
        if self._body.wants_usage:
            frame = self._frame("chat.completion.chunk")
            yield {**frame, "choices": [], "usage": self._usage.to_dict()}

    async def _outputs(self) -> AsyncGenerator[list[CompletionOutput], None]:
        """Yields the engine's outputs, after the request was admitted."""
        served, body = self._served, self._body
        with served.admission.admit(self._params.n):
            prompt = await served.prompts.from_messages(body, self._use.tools)
            generated = served.generate(prompt, self._params, self._id, body.priority)
            async with aclosing(generated) as outputs:
                async for output in outputs:
                    self._usage.add(output)
                    yield output.outputs

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        choice = self._choices[completion.index]
        parsed = choice.parse(completion)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
        if parsed.calls:
            message["content"] = parsed.content or None
            message["tool_calls"] = [
                {k: v for k, v in call.to_delta().items() if k != "index"} for call in parsed.calls
            ]
        return {
            "index": completion.index,
            "message": message,
            "logprobs": self._logprobs(completion),
            "finish_reason": choice.finish_reason(completion),
            "stop_reason": completion.stop_reason,
        }

    def _delta(self, completion: CompletionOutput) -> Event | None:
        choice = self._choices[completion.index]
        parsed = choice.parse(completion)
        logprobs = self._logprobs(completion)
        if not (parsed.content or parsed.calls or logprobs or completion.finished):
            return None
        delta: dict[str, Any] = {}
        if parsed.content or not parsed.calls:
            delta["content"] = parsed.content
        if parsed.calls:
            delta["tool_calls"] = [call.to_delta() for call in parsed.calls]
        if completion.finished and not (parsed.content or parsed.calls):
            delta = {}
        chunk = self._chunk(completion.index, delta, logprobs, choice.finish_reason(completion))
        if completion.finished:
            chunk["choices"][0]["stop_reason"] = completion.stop_reason
        return chunk

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
            chunk["usage"] = None
        return chunk

    def _frame(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._served.name,
        }
