"""How the server is."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from torch_armllm._version import __version__
from torch_armllm.server.errors import ApiError
from torch_armllm.server.model_registry import models_of

router = APIRouter()


@router.get("/health", response_model=None)
async def health(request: Request) -> Response:
    """200 while all engines run."""
    dead = [serving.name for serving in models_of(request) if serving.llm.errored]
    if dead:
        text = f"the engine of {', '.join(dead)} does not run any more"
        raise ApiError(503, text, code="engine_dead")
    return Response()


@router.get("/version")
async def version() -> dict[str, str]:
    """Of this package."""
    return {"version": __version__}


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    """Numbers for Prometheus."""
    page = models_of(request).metrics.page()
    return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")
