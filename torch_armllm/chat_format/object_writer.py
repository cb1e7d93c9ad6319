"""Writing of a JSON object to the arguments of a call."""

from __future__ import annotations

import json

from torch_armllm.chat_format.writer import Writer


class ObjectWriter:
    """Writes the brackets and keys of an object; its values are written to the same writer.

    Args:
        writer: of the message.

    Attributes:
        is_empty: True before the first key.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.is_empty = True

    def key(self, key: str) -> None:
        """Writes a key, with what is before it."""
        self._writer.arguments(f"{'{' if self.is_empty else ', '}{json.dumps(key, ensure_ascii=False)}: ")
        self.is_empty = False

    def end(self) -> None:
        """Ends the object."""
        self._writer.arguments("{}" if self.is_empty else "}")
