"""The application: routes, and what stands before all of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from torch_armllm._version import __version__
from torch_armllm.server.errors import add_error_handlers
from torch_armllm.server.middleware.auth import Authentication
from torch_armllm.server.middleware.limits import BodyLimit
from torch_armllm.server.model_registry import Leases, Models
from torch_armllm.server.routes import admin, embeddings, generation, health, models, page, tokens


def build_app(served: Models) -> FastAPI:
    """An application that serves models; whoever runs it closes them.

    Args:
        served: what answers.
    """
    settings = served.settings

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        yield
        for serving in served:
            serving.conversations.close()

    app = FastAPI(
        title="torch_armllm",
        version=__version__,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.models = served
    for group in (page, models, generation, embeddings, tokens, admin, health):
        app.include_router(group.router)
    add_error_handlers(app)
    app.add_middleware(Leases)
    app.add_middleware(BodyLimit, most=settings.max_request_bytes, seconds=settings.read_timeout)
    if settings.api_keys:
        app.add_middleware(Authentication, keys=settings.api_keys)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    return app
