"""Which models there are."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from torch_armllm.server.model_registry import models_of
from torch_armllm.server.served_model import Serving

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """All of them."""
    return {"object": "list", "data": [card(serving) for serving in models_of(request)]}


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> dict[str, Any]:
    """One by its name."""
    return card(models_of(request).find(name))


def card(serving: Serving) -> dict[str, Any]:
    """What clients are told of a model."""
    return {
        "id": serving.name,
        "object": "model",
        "created": serving.created,
        "owned_by": "torch_armllm",
        "root": serving.model.source or serving.name,
        "parent": None,
        "max_model_len": serving.max_model_len,
    }
