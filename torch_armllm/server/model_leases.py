"""Leases: models stay loaded while a request uses them."""

from __future__ import annotations

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from torch_armllm.pooling.pooling_engine import PoolingEngine
from torch_armllm.server.errors import ApiError
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
    """Returns the generating model that a request names, and keeps it loaded until the response was sent.

    Raises:
        ApiError: there is no such model, or it pools.
    """
    served = lease_any(request, name, pools=False)
    if served.pooling is not None:
        tasks = ", ".join(served.pooling.model.tasks)
        raise _wrong_kind(request, f"the model {served.name!r} pools ({tasks})", "generates", "generate")
    return served


def lease_pooling(request: Request, name: str | None) -> tuple[ServedModel, PoolingEngine]:
    """Returns the pooling model that a request names, as `lease_model` does, and its engine.

    Raises:
        ApiError: there is no such model, or it generates.
    """
    served = lease_any(request, name, pools=True)
    if served.pooling is None:
        raise _wrong_kind(request, f"the model {served.name!r} generates", "pools", "pooling")
    return served, served.pooling


def lease_any(request: Request, name: str | None, pools: bool | None = None) -> ServedModel:
    """Returns the model that a request names, of any kind, with its adapter, as `lease_model` does.

    Args:
        request: the request.
        name: of the model; None: the first that was loaded.
        pools: the kind of model among which the first is looked for; None: any.

    Raises:
        ApiError: there is no such model.
    """
    registry = registry_of(request)
    if name is None and pools is not None:
        name = next((each.name for each in registry if (each.pooling is not None) is pools), None)
    served, adapter = registry.find_with_adapter(name)
    served.acquire()
    request.scope[_LEASED].append(served)
    return served if adapter is None else served.with_adapter(adapter)


def _wrong_kind(request: Request, what: str, needs: str, runner: str) -> ApiError:
    text = f"{what}, and {request.url.path} needs one that {needs}: name another, or serve it with --runner"
    return ApiError(400, f"{text} {runner}", "model", "wrong_kind_of_model")
