"""The front of a Ray application: it takes HTTP requests and relays each to a replica of its model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from torch_armllm.serve_ray.relayed_request import RelayedRequest, model_and_text
from torch_armllm.server.errors import ApiError
from torch_armllm.server.settings import ServerSettings


class Front:
    """Relays requests.

    Args:
        models: handles of the deployments by the names of their models; a request that names none goes to
            the first.
    """

    def __init__(self, models: Mapping[str, Any]) -> None:
        self._models = {name: handle.options(stream=True).relay for name, handle in models.items()}

    async def __call__(self, request: Request) -> Response:
        """Answers a request."""
        if request.method == "GET" and request.url.path == "/v1/models":
            return await self._list(request)
        try:
            body = await _body(request)
            name, text = model_and_text(body)
            return await self._answer(request, self._find(name), body, text)
        except ApiError as error:
            return error.response()

    async def _list(self, request: Request) -> Response:
        answers = [await self._answer(request, relay) for relay in self._models.values()]
        pages = []
        for each in answers:
            parts = [part async for part in each.body_iterator]
            pages.append(json.loads(b"".join(parts)))
        return JSONResponse({"object": "list", "data": [model for page in pages for model in page["data"]]})

    def _find(self, name: str | None) -> Any:
        if name is None:
            return next(iter(self._models.values()))
        if name not in self._models:
            available = ", ".join(map(repr, self._models))
            text = f"the model {name[:200]!r} does not exist; available models: {available}"
            raise ApiError(404, text, "model", "model_not_found")
        return self._models[name]

    async def _answer(
        self, request: Request, relay: Any, body: bytes = b"", text: bytes = b""
    ) -> StreamingResponse:
        place = request.method, request.url.path, request.url.query.encode()
        answers = relay.remote(RelayedRequest(*place, list(request.headers.raw), body, text))
        status, headers = await anext(answers)

        async def pieces() -> AsyncGenerator[bytes, None]:
            try:
                async for piece in answers:
                    yield piece
            except (asyncio.CancelledError, GeneratorExit):  # the client has left
                answers.cancel()
                raise

        response = StreamingResponse(pieces(), status)
        response.raw_headers = headers
        return response


async def _body(request: Request) -> bytes:
    """Returns the body of a request.

    Raises:
        ApiError: it is too large.
    """
    most = ServerSettings.max_request_bytes
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > most:
            raise ApiError(413, f"the request body is too large: at most {most} bytes are accepted")
        pieces.append(piece)
    return b"".join(pieces)
