"""Connections between ranks on several machines."""

from __future__ import annotations

import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

_HEADER = struct.Struct("<16sqq")
"""Opens a connection: the token of the rank that accepts it, the other's rank, and a number."""
_HEADER_SECONDS = 5.0


class RankConnections:
    """Stream sockets to all other ranks, several to each.

    Exchanges of gloo wake a thread on either side and take 0.14 ms in an idle machine and milliseconds in a
    busy one, where a socket of one's own takes 0.01 ms.

    Args:
        rank: number of this process.
        ranks: number of ranks.
        gather: returns what each rank gives, by which they learn each other's addresses.
        master: address of rank 0's machine, in the network of all; None: that of this machine's name.
        each: number of connections between two ranks.
        seconds: time in which all have to be connected.

    Attributes:
        sockets: for each number of a connection, the sockets by rank; None for this rank.

    Raises:
        ValueError: a rank cannot be reached in time.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        gather: Callable[[Any], list[Any]],
        master: str | None,
        each: int,
        seconds: float,
    ) -> None:
        self.sockets: list[list[socket.socket | None]] = [[None] * ranks for _ in range(each)]
        deadline = time.monotonic() + seconds
        address, token = own_address(master), secrets.token_bytes(16)
        with socket.create_server((address, 0), family=_family(address), backlog=ranks * each) as server:
            every = gather((address, server.getsockname()[1], token))
            for other in range(rank):
                for number in range(each):
                    self.sockets[number][other] = _connect(rank, other, number, every[other], deadline)
            while any(x is None for row in self.sockets for x in row[rank + 1 :]):
                self._accept(server, rank, token, deadline)

    def _accept(self, server: socket.socket, rank: int, token: bytes, deadline: float) -> None:
        """Accepts a connection; closes it if it is not that of a rank."""
        server.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            accepted, _ = server.accept()
        except TimeoutError:
            missing = [i for row in self.sockets for i, x in enumerate(row) if i > rank and x is None]
            raise ValueError(f"rank {missing[0]} has not connected to rank {rank} in time") from None
        try:
            accepted.settimeout(_HEADER_SECONDS)
            given, other, number = _HEADER.unpack(accepted.recv(_HEADER.size, socket.MSG_WAITALL))
        except (OSError, struct.error):
            accepted.close()
            return
        known = secrets.compare_digest(given, token) and 0 <= number < len(self.sockets)
        if known and rank < other < len(self.sockets[0]) and self.sockets[number][other] is None:
            self.sockets[number][other] = _prepared(accepted)
        else:
            accepted.close()

    def close(self) -> None:
        """Closes all sockets."""
        for row in self.sockets:
            for each in row:
                if each is not None:
                    each.close()


def own_address(master: str | None) -> str:
    """Returns the address of this machine in the network of the first rank's."""
    if master is None:
        return socket.gethostbyname(socket.gethostname())
    family, kind, _, _, place = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # sends nothing, and chooses the interface
        address: str = probe.getsockname()[0]
    return address


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _connect(
    rank: int, other: int, number: int, at: tuple[str, int, bytes], deadline: float
) -> socket.socket:
    address, port, token = at
    try:
        made = socket.create_connection((address, port), max(deadline - time.monotonic(), 0.001))
        made.sendall(_HEADER.pack(token, rank, number))
    except OSError as error:
        raise ValueError(f"rank {rank} cannot reach rank {other} at {address}:{port}: {error}") from error
    return _prepared(made)


def _prepared(made: socket.socket) -> socket.socket:
    """Lets a socket send at once, wait for any time, and notice a machine that has gone."""
    made.settimeout(None)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6)):
        made.setsockopt(socket.IPPROTO_TCP, name, seconds)
    return made
