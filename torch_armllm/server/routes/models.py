"""Routes that list the served models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from torch_armllm.lora.request import LoRARequest
from torch_armllm.server.model_leases import registry_of
from torch_armllm.server.served_model import ServedModel
from torch_armllm.server.speech_model import SpeechModel

router = APIRouter()
_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Parameters of a request that default to the model's ``generation_config``."""


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """Lists all models."""
    registry, cards = registry_of(request), []
    for served in registry:
        cards.append(model_card(served))
        cards += [adapter_card(served, adapter) for adapter in served.adapters.values()]
    cards += map(_speech_card, registry.speech.values())
    return {"object": "list", "data": cards}


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> dict[str, Any]:
    """Returns a model or an adapter by its name."""
    registry = registry_of(request)
    if name in registry.speech:
        return _speech_card(registry.speech[name])
    served, adapter = registry.find_with_adapter(name)
    return model_card(served) if adapter is None else adapter_card(served, adapter)


def _speech_card(served: SpeechModel) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "torch_armllm",
        "root": served.source or served.name,
        "parent": None,
        "tasks": ["transcribe", "translate"] if served.transcriber.languages else ["transcribe"],
    }


def model_card(served: ServedModel) -> dict[str, Any]:
    """Returns a model's entry in OpenAI's format, with its tasks, defaults and variables of the template."""
    recommended = _RECOMMENDED if served.pooling is None else ()
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "torch_armllm",
        "root": served.model_settings.source or served.name,
        "parent": None,
        "max_model_len": served.max_model_len,
        "default_sampling_params": {name: getattr(served.defaults, name) for name in recommended},
        "chat_template_kwargs": served.prompts.switches(),
        "tasks": ["generate"] if served.pooling is None else list(served.pooling.model.tasks),
        "tools": served.pooling is None and served.chat_format.problem is None,
        "input_modalities": list(served.llm.input_modalities),
    }


def adapter_card(served: ServedModel, adapter: LoRARequest) -> dict[str, Any]:
    """Returns an adapter's entry: that of its model, with its own name and folder."""
    own = {"id": adapter.lora_name, "root": adapter.lora_path, "parent": served.name}
    return {**model_card(served), **own}
