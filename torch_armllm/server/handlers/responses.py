"""Handler of responses."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from torch_armllm.server.handlers.chat_outputs import ChatOutputs
from torch_armllm.server.handlers.response_items import ResponseItems
from torch_armllm.server.handlers.streaming import Event
from torch_armllm.server.protocol.responses import ResponsesRequest
from torch_armllm.server.responses_input import chat_request
from torch_armllm.server.responses_tools import client_tools
from torch_armllm.server.served_model import ServedModel


class ResponsesHandler:
    """Handles one request for a response.

    Args:
        served: the model.
        body: the request.

    Raises:
        ApiError: the request is invalid.
    """

    def __init__(self, served: ServedModel, body: ResponsesRequest) -> None:
        self._served = served
        self._body = body
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._outputs = ChatOutputs(served, chat_request(body), self._id)
        self._items = ResponseItems(client_tools(body))

    async def count_input(self) -> dict[str, Any]:
        """Returns the number of tokens of the input."""
        prompt = await self._outputs.prompt()
        return {"object": "response.input_tokens", "input_tokens": len(prompt["prompt_token_ids"])}

    async def complete(self) -> dict[str, Any]:
        """Returns the complete response."""
        response: dict[str, Any] = {}
        async with aclosing(self._events()) as events:
            async for event in events:
                response = event.get("response", response)
        return response

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yields the response as numbered stream events."""
        number = 0
        async with aclosing(self._events()) as events:
            async for event in events:
                yield {**event, "sequence_number": number}
                number += 1

    async def _events(self) -> AsyncGenerator[Event, None]:
        reason = None
        async with aclosing(self._outputs()) as outputs:
            async for added in outputs:
                if reason is None:
                    reason = ""
                    for kind in ("response.created", "response.in_progress"):
                        yield {"type": kind, "response": self._response("in_progress")}
                for completion, delta in added:
                    if not self._body.include_reasoning:
                        delta.reasoning = ""
                    for event in self._items.add(delta):
                        yield event
                    reason = completion.finish_reason or reason
        status = "incomplete" if reason == "length" else "completed"
        for event in self._items.finish(status):
            yield event
        yield {"type": f"response.{status}", "response": self._response(status)}

    def _response(self, status: str) -> dict[str, Any]:
        """Returns the response so far, in OpenAI's format."""
        body, params = self._body, self._outputs.params
        finished = status != "in_progress"
        given = body.model_dump(by_alias=True, exclude_none=True, include={"tools", "tool_choice", "text"})
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._served.name,
            "output": self._items.output if finished else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "background": False,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "truncation": "disabled",
            "text": given.get("text", {"format": {"type": "text"}}),
            "tools": given.get("tools", []),
            "tool_choice": given.get("tool_choice", "auto"),
            "metadata": body.metadata or {},
            "usage": self._usage() if finished else None,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._outputs.usage.to_dict()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
            "total_tokens": usage["total_tokens"],
        }
