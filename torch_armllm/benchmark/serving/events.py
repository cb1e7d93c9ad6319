"""Parser of server-sent events from byte chunks of any size."""

from __future__ import annotations

import re
from collections.abc import Iterator

_LINE = re.compile(rb"\r\n|\n|\r(?!\Z)")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventReader:
    """Extracts the ``data`` of events by the HTML standard; other fields are ignored."""

    def __init__(self) -> None:
        self._partial_line = b""
        self._data: list[bytes] = []
        self._begun = False

    def feed(self, piece: bytes) -> Iterator[str]:
        """Returns the data of every event that a chunk completes.

        Args:
            piece: the next bytes of the stream.

        Raises:
            UnicodeDecodeError: an event is not UTF-8.
        """
        # A carriage return at the end stays: the line feed that may follow it belongs to it.
        *lines, self._partial_line = _LINE.split(self._partial_line + piece)
        for line in lines:
            if not self._begun:
                self._begun = True
                line = line.removeprefix(_BYTE_ORDER_MARK)
            if line:
                self._field(line)
            elif self._data:
                data, self._data = b"\n".join(self._data), []
                yield data.decode()

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
