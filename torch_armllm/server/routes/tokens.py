"""Texts to tokens and back."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from torch_armllm.server.errors import ApiError
from torch_armllm.server.model_registry import serving_of
from torch_armllm.server.protocol.tokens import DetokenizeRequest, TokenizeRequest

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeRequest) -> dict[str, Any]:
    """The tokens of a text or a conversation."""
    serving = serving_of(request, body.model)
    conversations = serving.conversations
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give a prompt or messages, one of them", "prompt")
    if body.prompt is not None:
        prompt = await conversations.of_text(body.prompt, body.add_special_tokens)
    else:
        prompt = await conversations.of_messages(body, body.tools)
    tokens = prompt["prompt_token_ids"]
    strings = conversations.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
    return {
        "count": len(tokens),
        "max_model_len": serving.max_model_len,
        "tokens": tokens,
        "token_strs": strings,
    }


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeRequest) -> dict[str, str]:
    """The text of tokens."""
    serving = serving_of(request, body.model)
    return {"prompt": await serving.conversations.text_of(body.tokens)}
