"""Answers to conversations."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from torch_armllm.engine.outputs import CompletionOutput
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.server.errors import ApiError
from torch_armllm.server.handlers.logprobs import TokenTexts, chat_logprobs
from torch_armllm.server.handlers.sampling_params import sampling_params
from torch_armllm.server.handlers.streaming import Event
from torch_armllm.server.handlers.usage import Usage
from torch_armllm.server.protocol.chat import ChatRequest
from torch_armllm.server.served_model import Serving
from torch_armllm.server.tools.choice import ToolUse, tool_use
from torch_armllm.server.tools.reader import Heard


class Choice:
    """One of a request's answers, on its way to the client."""

    def __init__(self, index: int, use: ToolUse) -> None:
        self.index = index
        self._use = use
        self._reader = use.reader()
        self._called = False

    def hear(self, answer: CompletionOutput) -> Heard:
        """What an output tells the client anew."""
        heard = self._reader.feed(answer.text)
        if answer.finished:
            rest = self._reader.finish()
            heard = Heard(heard.content + rest.content, heard.calls + rest.calls)
        if not self._use.several:
            heard.calls = [call for call in heard.calls if call.index == 0]
        self._called = self._called or bool(heard.calls)
        return heard

    def finish_reason(self, answer: CompletionOutput) -> str | None:
        """Why the answer ended, in OpenAI's words."""
        if answer.finish_reason == "stop" and self._called:
            return self._use.finish_reason
        return answer.finish_reason


class Chat:
    """Answers one request.

    Args:
        serving: the model.
        body: what the client asks for.

    Raises:
        ApiError: it cannot be served.
    """

    def __init__(self, serving: Serving, body: ChatRequest) -> None:
        self._serving = serving
        self._body = body
        self._use = tool_use(body, serving.conversations.template, serving.model.tool_parser)
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._texts = TokenTexts(serving.conversations.tokenizer)
        self._top = body.top_logprobs or 0
        self._params = self._settings()
        self._choices = [Choice(index, self._use) for index in range(self._params.n)]
        self._usage = Usage()

    def _settings(self) -> SamplingParams:
        body, serving = self._body, self._serving
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", "top_logprobs")
        most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        logprobs = self._top if body.logprobs else None
        more = {"logprobs": logprobs, **self._use.settings}
        return sampling_params(body, serving.defaults, most, serving.settings.max_tokens, **more)

    async def answer(self) -> dict[str, Any]:
        """The whole answer at once."""
        shown: list[dict[str, Any]] = []
        async with aclosing(self._outputs()) as outputs:
            async for answers in outputs:
                shown = [self._whole(answer) for answer in answers]
        return {**self._frame("chat.completion"), "choices": shown, "usage": self._usage.to_dict()}

    async def events(self) -> AsyncGenerator[Event, None]:
        """The answer in pieces."""
        begun = False
        async with aclosing(self._outputs()) as outputs:
            async for answers in outputs:
                if not begun:
                    begun = True
                    for choice in self._choices:
                        yield self._chunk(choice.index, {"role": "assistant", "content": ""})
                for answer in answers:
                    if (event := self._piece(answer)) is not None:
                        yield event
        if self._body.wants_usage:
            frame = self._frame("chat.completion.chunk")
            yield {**frame, "choices": [], "usage": self._usage.to_dict()}

    async def _outputs(self) -> AsyncGenerator[list[CompletionOutput], None]:
        """What the engine gives, once the request was let in."""
        serving, body = self._serving, self._body
        with serving.admission.admit(self._params.n):
            prompt = await serving.conversations.of_messages(body, self._use.tools)
            generated = serving.generate(prompt, self._params, self._id, body.priority)
            async with aclosing(generated) as outputs:
                async for output in outputs:
                    self._usage.add(output)
                    yield output.outputs

    def _whole(self, answer: CompletionOutput) -> dict[str, Any]:
        choice = self._choices[answer.index]
        heard = choice.hear(answer)
        message: dict[str, Any] = {"role": "assistant", "content": heard.content, "refusal": None}
        if heard.calls:
            message["content"] = heard.content or None
            message["tool_calls"] = [
                {k: v for k, v in call.to_delta().items() if k != "index"} for call in heard.calls
            ]
        return {
            "index": answer.index,
            "message": message,
            "logprobs": self._logprobs(answer),
            "finish_reason": choice.finish_reason(answer),
            "stop_reason": answer.stop_reason,
        }

    def _piece(self, answer: CompletionOutput) -> Event | None:
        choice = self._choices[answer.index]
        heard = choice.hear(answer)
        logprobs = self._logprobs(answer)
        if not (heard.content or heard.calls or logprobs or answer.finished):
            return None
        delta: dict[str, Any] = {}
        if heard.content or not heard.calls:
            delta["content"] = heard.content
        if heard.calls:
            delta["tool_calls"] = [call.to_delta() for call in heard.calls]
        if answer.finished and not (heard.content or heard.calls):
            delta = {}
        chunk = self._chunk(answer.index, delta, logprobs, choice.finish_reason(answer))
        if answer.finished:
            chunk["choices"][0]["stop_reason"] = answer.stop_reason
        return chunk

    def _logprobs(self, answer: CompletionOutput) -> dict[str, Any] | None:
        return chat_logprobs(answer.token_ids, answer.logprobs, self._top, self._texts)

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
            "model": self._serving.name,
        }
