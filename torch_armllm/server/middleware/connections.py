"""Client connections."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState


class Connections(ServerState):
    """The connections of a server.

    Attributes:
        closing: true once the server shuts down.
    """

    closing = False


class Connection(H11Protocol):
    """An HTTP connection that is closed if no complete request header arrives in time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        assert isinstance(self.server_state, Connections)
        if self.server_state.closing:  # accepted shortly before the server stopped listening
            self.shutdown()
        self._first_request = self.loop.call_later(self.timeout_keep_alive, self._close_unused)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._first_request.cancel()
        super().connection_lost(exc)

    def _close_unused(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()
