"""Routes of pooling models: what they compute of texts, classes, scores, and ranks."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from torch_armllm.server.handlers.completions import split_prompts
from torch_armllm.server.handlers.pooling import PoolingHandler, encoded
from torch_armllm.server.handlers.streaming import cancel_on_disconnect
from torch_armllm.server.model_leases import lease_pooling
from torch_armllm.server.protocol.pooling import ClassifyRequest, PoolingRequest, RerankRequest, ScoreRequest

router = APIRouter()


@router.post("/pooling", response_model=None)
async def pooling(request: Request, body: PoolingRequest) -> JSONResponse:
    """Returns what the model computes of texts: a vector, classes, or either of each token."""
    served, engine = lease_pooling(request, body.model)
    handler = PoolingHandler(served, engine, "pool", body.priority)

    async def work() -> dict[str, Any]:
        task = body.task or engine.model.tasks[0]
        pooled = await handler.pool(split_prompts(body.input), task, body.params(), body.prompt_name)
        data = [
            {"index": index, "object": "pooling", "data": encoded(each, body.encoding_format)}
            for index, each in enumerate(pooled.data)
        ]
        return _frame(handler, served.name, data=data, usage=pooled.usage())

    return await _respond(request, work())


@router.post("/classify", response_model=None)
async def classify(request: Request, body: ClassifyRequest) -> JSONResponse:
    """Returns the probabilities of the classes of texts, and the most probable class."""
    served, engine = lease_pooling(request, body.model)
    handler = PoolingHandler(served, engine, "classify", body.priority)

    async def work() -> dict[str, Any]:
        pooled = await handler.pool(split_prompts(body.input), "classify", body.params())
        labels = engine.model.kind.model.config.id2label or {}
        data = [
            {
                "index": index,
                "label": labels.get(int(each.argmax())),
                "probs": each.tolist(),
                "num_classes": len(each),
            }
            for index, each in enumerate(pooled.data)
        ]
        return _frame(handler, served.name, data=data, usage=pooled.usage())

    return await _respond(request, work())


@router.post("/score", response_model=None)
@router.post("/v1/score", response_model=None)
async def score(request: Request, body: ScoreRequest) -> JSONResponse:
    """Returns the scores of pairs of texts."""
    served, engine = lease_pooling(request, body.model)
    handler = PoolingHandler(served, engine, "score", body.priority)

    async def work() -> dict[str, Any]:
        pooled = await handler.score(_listed(body.text_1), _listed(body.text_2), body.params())
        data = [
            {"index": index, "object": "score", "score": float(each)}
            for index, each in enumerate(pooled.data)
        ]
        return _frame(handler, served.name, data=data, usage=pooled.usage())

    return await _respond(request, work())


@router.post("/rerank", response_model=None)
@router.post("/v1/rerank", response_model=None)
@router.post("/v2/rerank", response_model=None)
async def rerank(request: Request, body: RerankRequest) -> JSONResponse:
    """Returns documents in the order of their scores for a query, in the form of Jina and Cohere."""
    served, engine = lease_pooling(request, body.model)
    handler = PoolingHandler(served, engine, "rerank", body.priority)
    documents = [each if isinstance(each, str) else each.text for each in body.documents]

    async def work() -> dict[str, Any]:
        pooled = await handler.score([body.query], documents, body.params())
        results: list[dict[str, Any]] = [
            {"index": index, "relevance_score": float(each)} for index, each in enumerate(pooled.data)
        ]
        results.sort(key=lambda result: -result["relevance_score"])
        results = results[: body.top_n or None]
        if body.return_documents:
            for result in results:
                result["document"] = {"text": documents[result["index"]]}
        return {"id": handler.id, "model": served.name, "usage": pooled.usage(), "results": results}

    return await _respond(request, work())


async def _respond(request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> JSONResponse:
    return JSONResponse(await cancel_on_disconnect(request.receive, work))


def _frame(handler: PoolingHandler, model: str, **content: Any) -> dict[str, Any]:
    return {"id": handler.id, "object": "list", "created": handler.created, "model": model, **content}


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
