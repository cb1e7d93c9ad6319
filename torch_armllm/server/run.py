"""Running the server: sockets, signals and the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
from collections.abc import Generator

import uvicorn
from fastapi import FastAPI

from torch_armllm.server.app import build_app
from torch_armllm.server.middleware.connections import Connection
from torch_armllm.server.model_registry import Models
from torch_armllm.server.settings import ServerSettings

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Server(uvicorn.Server):
    """Ends when it is told to; see `make_server`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are `serve`'s."""
        yield


def listen(host: str, port: int, write_timeout: float) -> socket.socket:
    """A socket that listens.

    Args:
        host: an address of this machine.
        port: 0: any that is free.
        write_timeout: seconds after which the system drops connections whose peers take nothing.

    Raises:
        OSError: the address is taken, or none of this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends at once (TCP_NODELAY) only where the protocol is named: others' answers wait for 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * write_timeout))
        listening.bind((host, port))
    except OSError:
        listening.close()
        raise
    return listening


def make_server(app: FastAPI, settings: ServerSettings) -> Server:
    """What runs an application; setting its ``should_exit`` lets running requests finish, then ends it."""
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        backlog=_BACKLOG,
        timeout_keep_alive=max(1, int(settings.read_timeout)),
        timeout_graceful_shutdown=max(1, int(settings.drain_timeout)),
        log_level="warning",
        access_log=False,
        server_header=False,
    )
    return Server(config)


async def serve(models: Models, listening: socket.socket) -> None:
    """Serves until a signal comes: the first lets running requests finish, a second ends at once.

    Args:
        models: what answers; they are closed at the end.
        listening: see `listen`.
    """
    server = make_server(build_app(models), models.settings)

    def end(number: int) -> None:
        if server.should_exit:
            logger.warning("ended before all requests were answered")
            os._exit(128 + number)
        logger.info("ending: %d answers are being finished; a second signal ends at once", models.held)
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, end, number)
    try:
        await server.serve([listening])
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
        models.close()


def allow_many_connections() -> None:
    """Lets this process open as many files as the system allows: each connection is one."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
