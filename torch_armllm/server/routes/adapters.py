"""Routes that load and unload LoRA adapters while the server runs, with vLLM's names."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from torch_armllm.server.errors import bad_request
from torch_armllm.server.protocol.adapters import LoadAdapterRequest, UnloadAdapterRequest
from torch_armllm.server.routes.admin import admin_registry
from torch_armllm.server.routes.models import adapter_card

router = APIRouter()


@router.post("/v1/load_lora_adapter")
async def load_adapter(request: Request, body: LoadAdapterRequest) -> dict[str, Any]:
    """Loads an adapter, and responds when it is served."""
    registry = admin_registry(request)
    try:
        return adapter_card(*await registry.load_adapter(body.lora_name, body.lora_path, body.base_model))
    except ValueError as error:
        raise bad_request(error, "lora_path") from error


@router.post("/v1/unload_lora_adapter")
async def unload_adapter(request: Request, body: UnloadAdapterRequest) -> dict[str, Any]:
    """Serves an adapter no longer; running requests keep it."""
    await admin_registry(request).unload_adapter(body.lora_name)
    return {"id": body.lora_name, "object": "model", "deleted": True}
