"""How the server is."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

import torch_armllm
from torch_armllm.server.errors import ApiError
from torch_armllm.server.serving import serving_of

router = APIRouter()


@router.get("/health", response_model=None)
async def health(request: Request) -> Response:
    """200 while the engine runs."""
    if serving_of(request).llm.errored:
        raise ApiError(503, "the engine does not run any more", code="engine_dead")
    return Response()


@router.get("/version")
async def version() -> dict[str, str]:
    """Of this package."""
    return {"version": torch_armllm.__version__}


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    """Numbers for Prometheus."""
    page = serving_of(request).metrics.page()
    return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")
