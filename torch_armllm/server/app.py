"""The FastAPI application: routes, error handlers and middleware."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from torch_armllm._version import __version__
from torch_armllm.server.errors import add_error_handlers
from torch_armllm.server.middleware import request_ids
from torch_armllm.server.middleware.auth import Authentication
from torch_armllm.server.middleware.hosts import AllowedHosts, Hosts
from torch_armllm.server.middleware.limits import BodyLimit
from torch_armllm.server.middleware.panics import Panics
from torch_armllm.server.middleware.request_counts import RequestCounts
from torch_armllm.server.middleware.request_ids import RequestIds
from torch_armllm.server.middleware.unread_bodies import UnreadBodies
from torch_armllm.server.middleware.warnings import HEADER, WarningHeader
from torch_armllm.server.model_leases import ModelLeases
from torch_armllm.server.model_registry import ModelRegistry
from torch_armllm.server.protocol.error import ErrorBody
from torch_armllm.server.routes import (
    adapters,
    admin,
    audio,
    docs,
    embeddings,
    generation,
    health,
    models,
    page,
    pooling,
    tokens,
)


def build_app(registry: ModelRegistry) -> FastAPI:
    """Builds the application that serves the models of a registry.

    The caller closes the registry.

    Args:
        registry: the models; they may be loaded and unloaded while the application runs.
    """
    settings = registry.settings

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        registry.watch()
        yield
        for served in registry:
            served.prompts.close()

    app = FastAPI(
        title="torch_armllm",
        version=__version__,
        docs_url=None,  # FastAPI's own routes load scripts from a CDN; `routes.docs` has them here
        redoc_url=None,
        responses={
            "4XX": {"model": ErrorBody, "description": "The request is at fault, or there is no room for it"},
            "5XX": {"model": ErrorBody, "description": "The server is at fault, or is about to exit"},
        },
        lifespan=lifespan,
    )
    app.state.registry = registry
    app.include_router(page.router)
    app.include_router(docs.router)
    groups = models, generation, embeddings, pooling, audio, tokens, admin, adapters, health
    for group in groups:
        app.include_router(group.router, tags=[group.__name__.rpartition(".")[2]])
    add_error_handlers(app)
    app.add_middleware(Panics)
    app.add_middleware(ModelLeases)
    app.add_middleware(
        BodyLimit,
        max_bytes=settings.max_request_bytes,
        timeout=settings.read_timeout,
        larger=dict.fromkeys(audio.PATHS, settings.max_audio_bytes),
    )
    if settings.api_keys or settings.admin_api_key is not None:
        app.add_middleware(Authentication, keys=settings.api_keys, admin_key=settings.admin_api_key)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[HEADER, request_ids.HEADER],
        )
    app.state.allowed_hosts = AllowedHosts(
        settings.allowed_hosts, settings.host, bool(settings.api_keys), settings.allowed_origins
    )
    app.add_middleware(Hosts, allowed=app.state.allowed_hosts)
    app.add_middleware(WarningHeader)
    routes = [route for group in (page, docs, *groups) for route in group.router.routes]
    paths = {route.path for route in routes if isinstance(route, Route)}
    app.add_middleware(RequestCounts, paths=paths, count=registry.metrics.count_response)
    app.add_middleware(RequestIds)
    app.add_middleware(UnreadBodies, timeout=settings.read_timeout)  # the outermost: it sees every response
    return app
