"""Route of text embeddings."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from torch_armllm.pooling.pooling_engine import PoolingEngine
from torch_armllm.server.errors import ApiError
from torch_armllm.server.handlers.completions import split_prompts
from torch_armllm.server.handlers.embeddings import embed
from torch_armllm.server.handlers.pooling import PoolingHandler, encoded
from torch_armllm.server.handlers.streaming import cancel_on_disconnect
from torch_armllm.server.model_leases import lease_any
from torch_armllm.server.protocol.embeddings import EmbeddingRequest
from torch_armllm.server.served_model import ServedModel

router = APIRouter()


@router.post("/v1/embeddings", response_model=None)
async def embeddings(request: Request, body: EmbeddingRequest) -> JSONResponse:
    """Returns the embeddings of texts."""
    served = lease_any(request, body.model)
    if served.adapter is not None:
        text = f"{served.name!r} is an adapter, and embeddings are those of the model alone: name the model"
        raise ApiError(400, text, "model")
    work = _embed_all(served, body) if served.pooling is None else _pool_all(served, served.pooling, body)
    return JSONResponse(await cancel_on_disconnect(request.receive, work))


async def _pool_all(served: ServedModel, engine: PoolingEngine, body: EmbeddingRequest) -> dict[str, Any]:
    if body.pooling is not None:
        text = f"pooling is {body.pooling!r}, and the files of {served.name!r} define it: leave it out"
        raise ApiError(400, text, "pooling")
    handler = PoolingHandler(served, engine, "embd", body.priority)
    pooled = await handler.pool(split_prompts(body.input), "embed", body.params(), body.prompt_name)
    return _response(served, [encoded(each, body.encoding_format) for each in pooled.data], pooled.num_tokens)


async def _embed_all(served: ServedModel, body: EmbeddingRequest) -> dict[str, Any]:
    for name in ("prompt_name", "truncate_prompt_tokens"):
        if getattr(body, name) is not None:
            text = f"{name} is for models that pool, and {served.name!r} generates: leave it out"
            raise ApiError(400, text, name)
    prompts = split_prompts(body.input)
    vectors: list[Any] = []
    num_tokens = 0
    with served.admission.admit(len(prompts), at_once=1):
        for prompt in prompts:
            if isinstance(prompt, str):
                prompt = (await served.prompts.from_text(prompt))["prompt_token_ids"]
            vector = await embed(served, prompt, body)
            num_tokens += len(prompt)
            served.clients.charge(len(prompt))
            vectors.append(encoded(vector, body.encoding_format))
    return _response(served, vectors, num_tokens)


def _response(served: ServedModel, vectors: list[Any], num_tokens: int) -> dict[str, Any]:
    data = [{"object": "embedding", "index": i, "embedding": each} for i, each in enumerate(vectors)]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": served.name, "usage": usage}
