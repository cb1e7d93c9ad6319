"""Route of text embeddings."""

from __future__ import annotations

import base64
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from torch import Tensor

from torch_armllm.server.handlers.completions import split_prompts
from torch_armllm.server.handlers.embeddings import embed
from torch_armllm.server.handlers.streaming import cancel_on_disconnect
from torch_armllm.server.model_leases import lease_model
from torch_armllm.server.protocol.embeddings import EmbeddingRequest
from torch_armllm.server.served_model import ServedModel

router = APIRouter()


@router.post("/v1/embeddings", response_model=None)
async def embeddings(request: Request, body: EmbeddingRequest) -> JSONResponse:
    """Returns the embeddings of texts."""
    served = lease_model(request, body.model)
    return JSONResponse(await cancel_on_disconnect(request.receive, _embed_all(served, body)))


async def _embed_all(served: ServedModel, body: EmbeddingRequest) -> dict[str, Any]:
    prompts = split_prompts(body.input)
    data: list[dict[str, Any]] = []
    num_tokens = 0
    with served.admission.admit(len(prompts)):
        for index, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                prompt = (await served.prompts.from_text(prompt))["prompt_token_ids"]
            vector = await embed(served, prompt, body)
            num_tokens += len(prompt)
            served.clients.charge(len(prompt))
            data.append({"object": "embedding", "index": index, "embedding": _encode(vector, body)})
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": served.name, "usage": usage}


def _encode(vector: Tensor, body: EmbeddingRequest) -> str | list[float]:
    if body.encoding_format == "base64":
        return base64.b64encode(vector.numpy().tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers
