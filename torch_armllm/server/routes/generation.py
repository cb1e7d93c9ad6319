"""Answers to conversations and continuations of texts."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from torch_armllm.server.handlers.chat import Chat
from torch_armllm.server.handlers.completions import Completion
from torch_armllm.server.handlers.streaming import stream, unless_gone
from torch_armllm.server.model_registry import serving_of
from torch_armllm.server.protocol.chat import ChatRequest
from torch_armllm.server.protocol.completions import CompletionRequest

router = APIRouter()


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """Continues a conversation."""
    return await _respond(request, Chat(serving_of(request, body.model), body), bool(body.stream))


@router.post("/v1/completions", response_model=None)
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continues texts."""
    return await _respond(request, Completion(serving_of(request, body.model), body), bool(body.stream))


async def _respond(request: Request, asked: Chat | Completion, streamed: bool) -> Response:
    if streamed:
        return await stream(request.receive, asked.events())
    return JSONResponse(await unless_gone(request.receive, asked.answer()))
