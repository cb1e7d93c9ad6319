"""API errors in OpenAI's format."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response

from torch_armllm.server.middleware.request_ids import id_headers, request_id

logger = logging.getLogger(__name__)

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CLIENT_CLOSED_REQUEST = 499


class ApiError(Exception):
    """An error that is reported to the client.

    Args:
        status: HTTP status code.
        message: the problem and its remedy.
        param: the request field at fault.
        code: machine-readable error code.
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def to_dict(self) -> dict[str, Any]:
        """Returns the body of the response."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """Returns the HTTP response."""
        return JSONResponse(self.to_dict(), self.status, self.headers)


class ClientDisconnected(Exception):
    """The client closed the connection before its response was complete."""


def bad_request(error: Exception, param: str | None = None) -> ApiError:
    """Converts an exception that the request caused to a 400 error with the same message."""
    return ApiError(400, str(error), param)


def add_error_handlers(app: FastAPI) -> None:
    """Installs handlers that return all errors of an application in OpenAI's format."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RecursionError, _too_deep)
    app.add_exception_handler(ClientDisconnected, _disconnected)
    app.add_exception_handler(Exception, _unexpected)


def unexpected(error: BaseException) -> ApiError:
    """Logs an internal error, and returns a 500 error that does not disclose its text."""
    logger.error("the request %s failed", request_id() or "(unknown)", exc_info=error)
    return ApiError(500, "internal error; see the server's log")


async def _api_error(request: Request, error: ApiError) -> Response:
    if request.url.path.startswith("/v1/messages"):  # Anthropic's format is OpenAI's, and says that it is one
        return JSONResponse({"type": "error", **error.to_dict()}, error.status, error.headers)
    return error.response()


async def _invalid(request: Request, error: RequestValidationError) -> Response:
    faults: Sequence[dict[str, Any]] = error.errors()
    if not faults:
        return await _api_error(request, ApiError(400, "the request is not valid"))
    message = "; ".join(f"{_field(fault) or 'body'}: {fault['msg']}" for fault in faults[:5])
    return await _api_error(request, ApiError(400, message, _field(faults[0])))


def _field(fault: Mapping[str, Any]) -> str | None:
    """Returns the dotted path of the request field at fault."""
    parts = [str(part) for part in fault["loc"] if part != "body"]
    return ".".join(parts)[:200] or None


async def _http(request: Request, error: HTTPException) -> Response:
    detail = error.detail
    if error.status_code == HTTPStatus.NOT_FOUND:
        detail = f"no such route: {request.method} {request.url.path[:200]}"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        detail = f"{request.url.path} does not support {request.method}"
    return ApiError(error.status_code, str(detail), headers=error.headers).response()


async def _too_deep(request: Request, error: RecursionError) -> Response:
    return ApiError(400, "the request is nested too deeply").response()


async def _disconnected(request: Request, error: ClientDisconnected) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _unexpected(request: Request, error: Exception) -> Response:
    failed = unexpected(error)
    failed.headers |= id_headers(request.scope)
    return failed.response()
