"""Routes of health, version and metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from torch_armllm._version import __version__
from torch_armllm.server.errors import ApiError
from torch_armllm.server.model_leases import registry_of

router = APIRouter()


@router.get("/ping", response_model=None)
@router.post("/ping", response_model=None)
@router.get("/health", response_model=None)
async def health(request: Request) -> Response:
    """Returns 200 while all engines run, and 503 if one is dead or being rebuilt.

    A replica that is started again makes no 503 while another one serves.
    """
    registry = registry_of(request)
    for error in registry.missing:
        raise error
    for served in registry:
        if served.will_restart:
            raise served.dead_error()
    dead = [served.name for served in registry if served.llm.errored]
    if dead:
        text = f"the engine of {', '.join(dead)} is dead; restart the server"
        raise ApiError(503, text, code="engine_dead")
    for served in registry:
        served.check_replicas()
    return Response()


@router.get("/load")
async def load(request: Request) -> dict[str, int]:
    """Returns the number of sequences that were admitted and have not ended, over all models."""
    return {"server_load": sum(served.admission.num_admitted for served in registry_of(request))}


@router.get("/version")
async def version() -> dict[str, str]:
    """Returns the version of this package."""
    return {"version": __version__}


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    """Returns metrics in Prometheus' text format."""
    page = registry_of(request).metrics.render()
    return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")
