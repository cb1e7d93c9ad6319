"""Routes that load and unload models while the server runs."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from torch_armllm.server.errors import ApiError, bad_request
from torch_armllm.server.model_leases import registry_of
from torch_armllm.server.model_registry import ModelRegistry
from torch_armllm.server.protocol.admin import LoadRequest
from torch_armllm.server.routes.models import model_card
from torch_armllm.server.settings import ModelSettings

router = APIRouter(prefix="/v1/admin/models")


@router.post("")
async def load(request: Request, body: LoadRequest) -> dict[str, Any]:
    """Loads a model, and responds when it is served.

    A previous model of the same name finishes its running requests.
    """
    registry = admin_registry(request)
    name = body.name or body.model
    settings = ModelSettings(
        name,
        body.model,
        body.engine_arguments(),
        chat_template=body.chat_template,
        tool_parser=body.tool_call_parser,
        reasoning_parser=body.reasoning_parser,
    )
    try:
        return model_card(await registry.load(settings))
    except (ValueError, OSError, ImportError) as error:
        raise bad_request(error, "model") from error


@router.delete("/{name:path}")
async def unload(request: Request, name: str) -> dict[str, Any]:
    """Unloads a model, and responds when its running requests have finished and its memory is free."""
    await admin_registry(request).unload(name)
    return {"id": name, "object": "model", "deleted": True}


def admin_registry(request: Request) -> ModelRegistry:
    """Returns the model registry, if the server has an admin key, which the middleware has then checked.

    Raises:
        ApiError: the server has no admin key, so that any client could change its models.
    """
    registry = registry_of(request)
    if registry.settings.admin_api_key is None:
        text = "loading and unloading models requires a server with a key for it (--admin-api-key)"
        raise ApiError(403, text, code="no_admin_api_key")
    return registry
