"""Running the server: socket, signals, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import resource
import signal
import socket
from collections.abc import Callable, Generator

import uvicorn

from torch_armllm.server.app import build_app
from torch_armllm.server.middleware.connections import Connection, Connections
from torch_armllm.server.middleware.hosts import AllowedHosts
from torch_armllm.server.model_registry import ModelRegistry
from torch_armllm.server.worker_thread import run_in_worker_thread
from torch_armllm.system.allocator import release_free_memory

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LAST_RESPONSES = 5
"""Seconds after the drain timeout in which the ended requests get their responses."""
_TRIM_INTERVAL = 60.0
"""Seconds between returns of freed memory to the system."""


class Server(uvicorn.Server):
    """A uvicorn server that leaves signals to `serve`; see `make_server`.

    Args:
        config: uvicorn's settings.
        allowed_hosts: is told on which address the server listens.
        drain_timeout: seconds that running requests have to finish at shutdown.
        end_requests: ends all requests, with an error as their response.

    Attributes:
        ready: called once clients can connect.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        allowed_hosts: AllowedHosts,
        drain_timeout: float,
        end_requests: Callable[[], object],
    ) -> None:
        super().__init__(config)
        self._allowed_hosts = allowed_hosts
        self.server_state = self._connections = Connections()
        self._drain_timeout = drain_timeout
        self._end_requests = end_requests
        self.ready: Callable[[], object] = lambda: None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to listen."""
        for each in sockets or ():
            self._allowed_hosts.listen(each.getsockname()[0])
        await super().startup(sockets)
        if self.started:
            self.ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops listening, and closes each connection after its response."""
        self._connections.closing = True
        late = asyncio.get_running_loop().call_later(self._drain_timeout, self._end_requests)
        try:
            await super().shutdown(sockets)
        finally:
            late.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Captures nothing: `serve` handles the signals."""
        yield


def listen(host: str, port: int, write_timeout: float) -> socket.socket:
    """Returns a bound socket.

    Args:
        host: an address of this machine.
        port: TCP port; 0: any free port.
        write_timeout: seconds after which the system drops a connection whose peer acknowledges nothing.

    Raises:
        OSError: the address is in use, or not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the protocol is named; without it responses are delayed by 40 ms
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


def make_server(registry: ModelRegistry) -> Server:
    """Returns a server of models; set its ``should_exit`` to shut it down gracefully."""
    settings = registry.settings
    app = build_app(registry)
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        backlog=_BACKLOG,
        timeout_keep_alive=max(1, int(settings.read_timeout)),
        timeout_graceful_shutdown=math.ceil(settings.drain_timeout) + _LAST_RESPONSES,
        log_level="warning",
        access_log=False,
        server_header=False,
    )
    return Server(config, app.state.allowed_hosts, settings.drain_timeout, registry.end_requests)


async def serve(
    registry: ModelRegistry, listening: socket.socket, ready: Callable[[], object] = lambda: None
) -> None:
    """Serves until a signal arrives: the first lets running requests finish, the second exits at once.

    Args:
        registry: the served models; closed at the end.
        listening: a socket; see `listen`.
        ready: called once signals are handled and clients can connect.
    """
    server = make_server(registry)
    server.ready = ready

    def shut_down(number: int) -> None:
        if server.should_exit:
            logger.warning("exiting before all requests have finished")
            os._exit(128 + number)
        logger.info(
            "shutting down: %d sequences are still running; a second signal exits at once",
            registry.num_active,
        )
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, shut_down, number)
    trimming = loop.create_task(_trim_memory())
    try:
        await server.serve([listening])
    finally:
        trimming.cancel()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
        registry.close()


async def _trim_memory() -> None:
    """Returns freed memory to the system, again and again.

    Large requests free much between small allocations that stay, and glibc keeps it: a tenth of a server's
    memory within a quarter of an hour of mixed load.
    """
    while True:
        await asyncio.sleep(_TRIM_INTERVAL)
        await run_in_worker_thread(release_free_memory)


def allow_many_connections() -> None:
    """Raises this process's limit of open files to the system's maximum: each connection is a file."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
