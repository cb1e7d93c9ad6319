"""Handler of messages in Anthropic's format."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from torch_armllm.engine.outputs import CompletionOutput
from torch_armllm.server.handlers.chat_outputs import ChatOutputs
from torch_armllm.server.handlers.message_blocks import MessageBlocks
from torch_armllm.server.handlers.streaming import Event
from torch_armllm.server.messages_input import chat_request
from torch_armllm.server.protocol.messages import MessagesRequest
from torch_armllm.server.served_model import ServedModel

_TOOL_REASONS = ("tool_calls", "function_call")


class MessagesHandler:
    """Handles one request for a message.

    Args:
        served: the model.
        body: the request.

    Raises:
        ApiError: the request is invalid.
    """

    def __init__(self, served: ServedModel, body: MessagesRequest) -> None:
        self._served = served
        self._thinks = body.thinking is not None and body.thinking.type != "disabled"
        self._id = f"msg_{uuid.uuid4().hex}"
        self._outputs = ChatOutputs(served, chat_request(body, served.keeps_budgets), self._id)
        self._blocks = MessageBlocks()
        self._reason: str | None = None
        self._sequence: str | None = None

    async def complete(self) -> dict[str, Any]:
        """Returns the complete message."""
        async with aclosing(self.events()) as events:
            async for _ in events:
                pass
        return self._message(self._blocks.content)

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yields the message as stream events."""
        begun = False
        async with aclosing(self._outputs()) as outputs:
            async for added in outputs:
                if not begun:
                    begun = True
                    yield {"type": "message_start", "message": self._message([])}
                for completion, delta in added:
                    if not self._thinks:
                        delta.reasoning = ""
                    for event in self._blocks.add(delta):
                        yield event
                    self._note_end(completion)
        for event in self._blocks.finish():
            yield event
        end = {"stop_reason": self._reason, "stop_sequence": self._sequence}
        yield {"type": "message_delta", "delta": end, "usage": self._usage()}
        yield {"type": "message_stop"}

    def _note_end(self, completion: CompletionOutput) -> None:
        reason = self._outputs.choices[completion.index].finish_reason(completion)
        if reason is None:
            return
        if isinstance(completion.stop_reason, str) and reason == "stop":
            self._reason, self._sequence = "stop_sequence", completion.stop_reason
        elif reason == "length":
            self._reason = "max_tokens"
        else:
            self._reason = "tool_use" if reason in _TOOL_REASONS or self._has_calls else "end_turn"

    @property
    def _has_calls(self) -> bool:
        return any(block["type"] == "tool_use" for block in self._blocks.content)

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns the message so far."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._served.name,
            "content": content,
            "stop_reason": self._reason,
            "stop_sequence": self._sequence,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, int]:
        """Returns the usage; tokens of the prompt that the prefix cache held are counted apart."""
        usage = self._outputs.usage.to_dict()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }
