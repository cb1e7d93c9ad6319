"""Texts to vectors."""

from __future__ import annotations

import base64
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from torch import Tensor

from torch_armllm.server.handlers.completions import several_prompts
from torch_armllm.server.handlers.embeddings import embed
from torch_armllm.server.handlers.streaming import unless_gone
from torch_armllm.server.model_registry import serving_of
from torch_armllm.server.protocol.embeddings import EmbeddingRequest
from torch_armllm.server.served_model import Serving

router = APIRouter()


@router.post("/v1/embeddings", response_model=None)
async def embeddings(request: Request, body: EmbeddingRequest) -> JSONResponse:
    """Vectors of texts."""
    return JSONResponse(await unless_gone(request.receive, _answer(serving_of(request, body.model), body)))


async def _answer(serving: Serving, body: EmbeddingRequest) -> dict[str, Any]:
    prompts = several_prompts(body.input)
    data: list[dict[str, Any]] = []
    count = 0
    with serving.admission.admit(len(prompts)):
        for index, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                prompt = (await serving.conversations.of_text(prompt))["prompt_token_ids"]
            vector = await embed(serving, prompt, body)
            count += len(prompt)
            data.append({"object": "embedding", "index": index, "embedding": _shown(vector, body)})
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": data, "model": serving.name, "usage": usage}


def _shown(vector: Tensor, body: EmbeddingRequest) -> str | list[float]:
    if body.encoding_format == "base64":
        return base64.b64encode(vector.numpy().tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers
