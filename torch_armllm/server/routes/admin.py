"""Models come and go while the server runs."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from torch_armllm.server.errors import ApiError, bad_request
from torch_armllm.server.model_registry import Models, models_of
from torch_armllm.server.protocol.admin import LoadRequest
from torch_armllm.server.routes.models import card
from torch_armllm.server.settings import ModelSettings

router = APIRouter(prefix="/v1/admin/models")


@router.post("")
async def load(request: Request, body: LoadRequest) -> dict[str, Any]:
    """Loads a model, and answers when it can be asked; one that had its name finishes what it was asked."""
    models = _guarded(request)
    name = body.name or body.model
    model = ModelSettings(name, body.model, body.engine(), body.chat_template, body.tool_call_parser)
    try:
        return card(await models.load(model))
    except (ValueError, OSError, ImportError) as error:
        raise bad_request(error, "model") from error


@router.delete("/{name:path}")
async def unload(request: Request, name: str) -> dict[str, Any]:
    """Takes a model away, and answers when it has finished what it was asked and its memory is free."""
    await _guarded(request).unload(name)
    return {"id": name, "object": "model", "deleted": True}


def _guarded(request: Request) -> Models:
    """The models, for those who may change them.

    Raises:
        ApiError: the server asks for no key, so that anybody who can reach it could.
    """
    models = models_of(request)
    if not models.settings.api_keys:
        text = "models are loaded and unloaded only where the server was started with an API key (--api-key)"
        raise ApiError(403, text, code="no_api_key")
    return models
