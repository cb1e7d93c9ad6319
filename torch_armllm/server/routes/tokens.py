"""Routes that tokenize and detokenize."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from torch_armllm.engine.text.tokenization import Tokenization
from torch_armllm.server.errors import ApiError
from torch_armllm.server.model_leases import lease_any
from torch_armllm.server.protocol.tokens import DetokenizeRequest, TokenizeRequest

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeRequest) -> dict[str, Any]:
    """Returns the token ids of a text or a conversation."""
    served = lease_any(request, body.model)
    prompts = served.prompts
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", "prompt")
    if body.prompt is not None:
        prompt = await prompts.from_text(body.prompt, Tokenization(body.add_special_tokens))
    else:
        prompt = await prompts.from_messages(body, body.tools)
    tokens = prompt["prompt_token_ids"]
    strings = prompts.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
    return {
        "count": len(tokens),
        "max_model_len": served.max_model_len,
        "tokens": tokens,
        "token_strs": strings,
    }


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeRequest) -> dict[str, str]:
    """Returns the text of token ids."""
    served = lease_any(request, body.model)
    return {"prompt": await served.prompts.decode(body.tokens)}
