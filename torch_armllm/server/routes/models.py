"""Which models there are."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from torch_armllm.server.serving import Serving, serving_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """All of them."""
    return {"object": "list", "data": [_card(serving_of(request))]}


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> dict[str, Any]:
    """One by its name."""
    serving = serving_of(request)
    serving.check_model(name)
    return _card(serving)


def _card(serving: Serving) -> dict[str, Any]:
    return {
        "id": serving.settings.name,
        "object": "model",
        "created": serving.created,
        "owned_by": "torch_armllm",
        "root": serving.settings.name,
        "parent": None,
        "max_model_len": serving.max_model_len,
    }
