"""Files that go with the next message of a chat in the terminal."""

from __future__ import annotations

import base64
import mimetypes
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 26
"""Of a file, as of one that a URL names."""


_ARTICLES = {"image": "an", "audio": "an", "video": "a"}
COMMANDS = {f"/{modality}": modality for modality in _ARTICLES}
"""Modalities by the commands that attach a file."""


class Attachments:
    """Files that go with the next message.

    Args:
        modalities: what the model takes, `LLMBase.input_modalities`.
        check: raises ValueError or ImportError for a part that cannot be read.
    """

    def __init__(self, modalities: Sequence[str], check: Callable[[Mapping[str, Any]], None]) -> None:
        self._modalities, self._check = modalities, check
        self._parts: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def commands(self) -> list[str]:
        """The commands that this model's chats have."""
        return [command for command, name in COMMANDS.items() if name in self._modalities]

    @property
    def help(self) -> list[str]:
        """Says what each of the commands does."""
        names = [COMMANDS[command] for command in self.commands]
        return [f"/{name} FILE adds {_ARTICLES[name]} {name} to the next message" for name in names]

    def add(self, name: str, typed: str) -> str:
        """Attaches a file.

        Args:
            name: of the modality.
            typed: the name of the file, which may be quoted, as terminals write one that is dropped on them.

        Returns:
            The file's name.

        Raises:
            ValueError: the model takes no such files, or the file cannot be read.
        """
        if name not in self._modalities:
            raise ValueError(f"this model takes no {name}, only {' and '.join(self._modalities)}")
        if not typed:
            raise ValueError(f"give a file: /{name} FILE")
        path = _named(typed)
        kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        data = base64.b64encode(_content(path)).decode()
        part = {"type": f"{name}_url", f"{name}_url": {"url": f"data:{kind};base64,{data}"}}
        try:
            self._check(part)
        except (ImportError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error
        self._parts.append(part)
        return path.name

    def take(self) -> list[dict[str, Any]]:
        """Returns the parts of the next message, and forgets them."""
        parts, self._parts = self._parts, []
        return parts


def _named(typed: str) -> Path:
    """Returns the file that a user means, as it is typed or as a shell reads it."""
    name = os.path.expanduser(typed)
    if not os.path.exists(name):
        try:
            words = shlex.split(typed)
        except ValueError:  # a quotation mark of the name's own
            words = []
        if len(words) == 1:
            name = os.path.expanduser(words[0])
    return Path(name)


def _content(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise ValueError(f"{path} is a folder" if path.is_dir() else f"there is no file {path}")
        size = path.stat().st_size
        if not 0 < size <= MOST_BYTES:
            raise ValueError(f"{path} has {size} bytes; a file may have 1 to {MOST_BYTES}")
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
