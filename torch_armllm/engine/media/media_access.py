"""The files of URLs in messages: what may be read, and reading it."""

from __future__ import annotations

import base64
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from os import PathLike
from pathlib import Path
from typing import IO, Any
from urllib.parse import SplitResult, unquote, urlsplit

_MOST_BYTES = 1 << 26
_MOST_SECONDS = 10.0
_CHUNK = 1 << 16
_NAMES = {"image": "an image", "audio": "an audio file", "video": "a video"}
_EXAMPLES = {
    "image": "data:image/png;base64,…",
    "audio": "data:audio/wav;base64,…",
    "video": "data:video/mp4;base64,…",
}


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Makes a redirect an error: it could lead to a host that is not allowed."""

    def redirect_request(self, *_: Any) -> None:
        return None


@dataclass(frozen=True)
class MediaAccess:
    """Rights of the URLs in messages.

    Attributes:
        folder: in which ``file://`` URLs may lie; None: nowhere.
        domains: hosts from which ``http://`` and ``https://`` URLs are fetched; redirects are not followed.
    """

    folder: str | PathLike[str] | None = None
    domains: Sequence[str] = ()

    def read(self, url: str, modality: str = "image") -> bytes:
        """Returns the content of a URL: ``data``, ``file``, ``http`` or ``https``.

        Args:
            url: the URL.
            modality: ``image``, ``audio`` or ``video``: what it names, for errors.

        Raises:
            ValueError: it may not be read, or cannot be; or has more than 64 MiB.
        """
        scheme, name = url.partition(":")[0].lower(), _NAMES[modality]
        if scheme == "data":
            return _decoded(url, modality)
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise ValueError(f"the URL of {name} is damaged: {error}") from error
        if scheme == "file":
            return self._read_file(parts, name)
        if scheme in ("http", "https"):
            return self._fetched(url, parts.hostname or "", name)
        raise ValueError(f"{name} is not read from {scheme[:20]} URLs; send {_EXAMPLES[modality]}")

    def _read_file(self, parts: SplitResult, name: str) -> bytes:
        if self.folder is None:
            raise ValueError(
                "file URLs are not allowed: send a data URL, or set allowed_media_path to a folder"
            )
        path = Path(unquote(parts.path)).resolve()
        if parts.netloc not in ("", "localhost") or not path.is_relative_to(Path(self.folder).resolve()):
            raise ValueError(f"the file URL of {name} leads out of the folder allowed_media_path")
        try:
            if not path.is_file() or path.stat().st_size > _MOST_BYTES:
                most = f"{_MOST_BYTES >> 20} MiB"
                raise ValueError(f"the file URL of {name} names no file of at most {most}")
            return path.read_bytes()
        except OSError as error:
            raise ValueError(f"the file of {name} cannot be read: {error.strerror}") from error

    def _fetched(self, url: str, host: str, name: str) -> bytes:
        if host not in self.domains:
            raise ValueError(
                f"{name} is not fetched from {host[:100]!r}: send a data URL, or put the host into "
                "allowed_media_domains"
            )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)
        try:
            with opener.open(url, timeout=_MOST_SECONDS) as answer:
                return _content(answer, name)
        except (OSError, HTTPException, UnicodeError) as error:
            raise ValueError(f"{name} cannot be fetched from {host!r}: {error}") from error


def _decoded(url: str, modality: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise ValueError(f"the data URL of {_NAMES[modality]} must begin as {_EXAMPLES[modality]}")
    try:
        return base64.b64decode(body, validate=True)
    except ValueError as error:
        raise ValueError(f"the data URL of {_NAMES[modality]} is no base64: {error}") from error


def _content(answer: IO[bytes], name: str) -> bytes:
    """Returns what a host sends; one that sends too slowly or too much is cut off."""
    end, parts, size = time.monotonic() + _MOST_SECONDS, [], 0
    while part := answer.read1(_CHUNK):  # type: ignore[attr-defined]
        parts.append(part)
        size += len(part)
        if size > _MOST_BYTES:
            raise ValueError(f"{name} that is fetched may have {_MOST_BYTES >> 20} MiB; this one has more")
        if time.monotonic() > end:
            raise ValueError(f"{name} was not fetched within {_MOST_SECONDS:.0f} seconds")
    if getattr(answer, "length", None):  # bytes that were announced and did not come
        raise HTTPException("the connection ended early")
    return b"".join(parts)
