"""Leases: models stay loaded while a request uses them."""

from __future__ import annotations

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from torch_armllm.server.model_registry import ModelRegistry
from torch_armllm.server.served_model import ServedModel

_LEASED = "torch_armllm.leased_models"
"""Key of an ASGI scope's list of leased models."""


class ModelLeases:
    """ASGI middleware that releases a request's models after its response was sent.

    Args:
        app: the application; it leases models with `lease_model`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        leased: list[ServedModel] = []
        scope[_LEASED] = leased
        try:
            await self._app(scope, receive, send)
        finally:
            for served in leased:
                served.release()


def registry_of(request: Request) -> ModelRegistry:
    """Returns the model registry of a request's server."""
    registry: ModelRegistry = request.app.state.registry
    return registry


def lease_model(request: Request, name: str | None) -> ServedModel:
    """Returns the model that a request names, and keeps it loaded until the response was sent.

    Raises:
        ApiError: there is no such model.
    """
    served = registry_of(request).find(name)
    served.acquire()
    request.scope[_LEASED].append(served)
    return served
