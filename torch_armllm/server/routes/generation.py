"""Routes that generate: chat completions, responses, text completions and infilling."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from torch_armllm.server import messages_input
from torch_armllm.server.handlers.chat import ChatHandler
from torch_armllm.server.handlers.completions import CompletionHandler
from torch_armllm.server.handlers.infill import InfillHandler
from torch_armllm.server.handlers.messages import MessagesHandler
from torch_armllm.server.handlers.responses import ResponsesHandler
from torch_armllm.server.handlers.streaming import Event, cancel_on_disconnect, event_stream
from torch_armllm.server.model_leases import lease_model
from torch_armllm.server.protocol.chat import ChatRequest
from torch_armllm.server.protocol.completions import CompletionRequest
from torch_armllm.server.protocol.infill import InfillRequest
from torch_armllm.server.protocol.messages import CountTokensRequest, MessagesRequest
from torch_armllm.server.protocol.responses import ResponsesRequest

router = APIRouter()


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """Generates the next message of a conversation."""
    return await _respond(request, ChatHandler(lease_model(request, body.model), body), bool(body.stream))


@router.post("/v1/responses", response_model=None)
async def responses(request: Request, body: ResponsesRequest) -> Response:
    """Generates the next items of a conversation, and stores nothing."""
    handler = ResponsesHandler(lease_model(request, body.model), body)
    return await _respond(request, handler, bool(body.stream), done=False)


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(request: Request, body: ResponsesRequest) -> dict[str, Any]:
    """Counts the tokens of a request for a response."""
    return await ResponsesHandler(lease_model(request, body.model), body).count_input()


@router.post("/v1/messages", response_model=None)
async def messages(request: Request, body: MessagesRequest) -> Response:
    """Generates the next message of a conversation, in Anthropic's format."""
    handler = MessagesHandler(lease_model(request, body.model), body)
    return await _respond(request, handler, bool(body.stream), done=False)


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request, body: CountTokensRequest) -> dict[str, int]:
    """Counts the tokens of a conversation, in Anthropic's format."""
    chat = messages_input.chat_request(body)
    prompt = await lease_model(request, body.model).prompts.from_messages(chat, chat.tools)
    return {"input_tokens": len(prompt["prompt_token_ids"])}


@router.post("/v1/completions", response_model=None)
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continues texts."""
    handler = CompletionHandler(lease_model(request, body.model), body)
    return await _respond(request, handler, bool(body.stream))


@router.post("/infill", response_model=None)
async def infill(request: Request, body: InfillRequest) -> Response:
    """Writes the text between two others, in llama.cpp's format."""
    handler = InfillHandler(lease_model(request, body.model), body)
    return await _respond(request, handler, bool(body.stream), done=False)


class Handler(Protocol):
    """Generates the response to one request."""

    async def complete(self) -> dict[str, Any]:
        """Returns the complete response."""
        ...

    def events(self) -> AsyncGenerator[Event, None]:
        """Yields the response as stream events."""
        ...


async def _respond(request: Request, handler: Handler, stream: bool, done: bool = True) -> Response:
    if stream:
        return await event_stream(request.receive, handler.events(), done)
    return JSONResponse(await cancel_on_disconnect(request.receive, handler.complete()))
