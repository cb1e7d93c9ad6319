"""A proxy on loopback that refuses every connection and notes its host: it shows who calls home."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def refusing_proxy() -> Iterator[tuple[dict[str, str], list[str]]]:
    """Runs the proxy.

    Yields:
        The environment that sends everything but loopback to it, and the hosts that were asked for.
    """
    hosts: list[str] = []

    class Refusal(BaseHTTPRequestHandler):
        def refuse(self) -> None:
            hosts.append(self.path)
            self.send_error(403)

        do_CONNECT = do_GET = do_POST = do_HEAD = refuse

        def log_message(self, *_: Any) -> None:
            """Writes nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusal) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        loopback = "127.0.0.1,localhost"
        names = {"HTTP_PROXY": url, "HTTPS_PROXY": url, "ALL_PROXY": url, "NO_PROXY": loopback}
        try:
            yield {**names, **{name.lower(): value for name, value in names.items()}}, hosts
        finally:
            server.shutdown()
            thread.join()
