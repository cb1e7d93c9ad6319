"""URLs of pictures: hosts that are allowed, and what hosts may do."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.media import media_access
from torch_armllm.engine.media.media_access import MediaAccess

ALLOWED = MediaAccess(domains=["127.0.0.1"])


class _Host(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/away":
            self.send_response(302)
            self.send_header("Location", "/cat")
            self.end_headers()
            return
        if self.path not in ("/cat", "/slow", "/cut"):
            self.send_error(404)
            return
        self.send_response(200)
        if self.path == "/cut":
            self.send_header("Content-Length", "100")
        self.end_headers()
        for _ in range(5):
            self.wfile.write(b"cat")
            self.wfile.flush()
            time.sleep(0.05 if self.path == "/slow" else 0)

    def log_message(self, *_: object) -> None:
        """Writes nothing."""


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Host)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_allowed_hosts_are_read(host: str) -> None:
    assert ALLOWED.read(f"{host}/cat") == b"cat" * 5


@pytest.mark.parametrize(
    ("path", "message"),
    [("/away", "cannot be fetched from '127.0.0.1': .*302"), ("/none", "404"), ("/cut", "cannot be fetched")],
)
def test_answers_that_are_no_pictures_are_refused(host: str, path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ALLOWED.read(host + path)


@pytest.mark.parametrize("domains", [[], ["example.org"]], ids=str)
def test_other_hosts_are_refused(host: str, domains: list[str]) -> None:
    with pytest.raises(ValueError, match="not fetched from '127.0.0.1': .* allowed_media_domains"):
        MediaAccess(domains=domains).read(f"{host}/cat")


@pytest.mark.parametrize(
    "url",
    ["http://", "http://[", "https://127.0.0.1:x/", "ftp://127.0.0.1/cat", "http://127.0.0.1@example.org/"],
)
def test_odd_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="an image"):
        ALLOWED.read(url)


def test_hosts_that_send_too_much_or_too_slowly_are_cut_off(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(media_access, "_MOST_BYTES", 10)
        with pytest.raises(ValueError, match="this one has more"):
            ALLOWED.read(f"{host}/cat")
    monkeypatch.setattr(media_access, "_MOST_SECONDS", 0.1)
    with pytest.raises(ValueError, match="not fetched within"):
        ALLOWED.read(f"{host}/slow")


@pytest.mark.parametrize("domains", ["example.org", [1]])
def test_domains_are_a_list(domains: object) -> None:
    with pytest.raises(TypeError, match="allowed_media_domains"):
        EngineConfig(allowed_media_domains=domains)  # type: ignore[arg-type]
