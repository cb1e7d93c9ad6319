"""A file of blocks and states: safetensors, with a checksum and the identity of its model."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Sequence
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, NamedTuple

from torch_armllm.kv_cache.disk.rows import Bytes
from torch_armllm.system.files import atomic_file
from torch_armllm.system.own_files import open_own

FORMAT = "torch_armllm KV 1"
"""Changes with everything that a reader has to know of the files."""
SUFFIX = ".safetensors"
_ALIGNMENT = 64
_LARGEST_HEADER = 1 << 20


class DamagedError(ValueError):
    """A file does not hold what was written."""


class Section(NamedTuple):
    """A tensor of a file."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "U8"
    """safetensors' name of the dtype, `U8` or `I32`."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        count = 4 if self.dtype == "I32" else 1
        for size in self.shape:
            count *= size
        return count


class Identity(NamedTuple):
    """The model whose file it is, and the tokens."""

    fingerprint: str
    digest: bytes


def header(identity: Identity, sections: Sequence[Section], checksum: int) -> bytes:
    """Returns all that precedes the tensors' bytes; its length does not depend on the checksum."""
    begin, fields = 0, {}
    for section in sections:
        offsets = [begin, begin := begin + section.nbytes]
        fields[section.name] = {"dtype": section.dtype, "shape": section.shape, "data_offsets": offsets}
    metadata = {
        "format": FORMAT,
        "fingerprint": identity.fingerprint,
        "digest": identity.digest.hex(),
        "crc32": f"{checksum:08x}",
    }
    text = json.dumps({"__metadata__": metadata, **fields}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def file_size(sections: Sequence[Section]) -> int:
    """Returns the bytes of a file with these tensors."""
    nothing = Identity("0" * 32, b"\0" * 20)
    return len(header(nothing, sections, 0)) + sum(section.nbytes for section in sections)


def write_record(
    path: Path, identity: Identity, sections: Sequence[Section], values: Iterable[Bytes]
) -> None:
    """Writes a file, which appears under its name when all of it is on the disk.

    Args:
        path: the file; its folder exists.
        identity: of its contents.
        sections: its tensors.
        values: their bytes, in order; a tensor may come in several pieces.

    Raises:
        OSError: the file cannot be written.
    """
    with atomic_file(path, shared=True, durable=True) as scratch, scratch.open("wb") as file:
        file.write(header(identity, sections, 0))
        checksum = 0
        for value in values:
            checksum = zlib.crc32(value.data, checksum)
            file.write(value.data)
        file.seek(0)
        file.write(header(identity, sections, checksum))


def read_record(path: Path, identity: Identity, section: Section, into: Bytes) -> None:
    """Reads a file of one tensor.

    Args:
        path: the file.
        identity: that it must have.
        section: the tensor.
        into: receives its bytes.

    Raises:
        DamagedError: the file is not as it was written, or is another one.
        OSError: it cannot be read, or is not this user's own.
    """
    with FileIO(open_own(path)) as file:
        begin = file.read(len(header(identity, [section], 0)))
        if os.fstat(file.fileno()).st_size != len(begin) + section.nbytes:
            raise DamagedError("it has another size")
        fill(file, into)
    if begin != header(identity, [section], zlib.crc32(into.data)):
        raise DamagedError("its checksum or its header is wrong")


def read_header(file: BufferedReader) -> dict[str, Any]:
    """Returns the header's JSON; the file is then at the first tensor's bytes.

    Raises:
        DamagedError: it has no such header.
    """
    size = int.from_bytes(file.read(8), "little")
    if size > _LARGEST_HEADER:
        raise DamagedError("it has no header")
    try:
        fields = json.loads(file.read(size))
        if fields["__metadata__"]["format"] != FORMAT:
            raise DamagedError(f"its format is not {FORMAT!r}")
    except (ValueError, TypeError, KeyError) as error:
        raise error if isinstance(error, DamagedError) else DamagedError("it has no header") from None
    assert isinstance(fields, dict)
    return fields


def fill(file: FileIO | BufferedReader, into: Bytes) -> None:
    """Reads as many bytes as there is room for.

    Raises:
        DamagedError: the file ends before.
    """
    rest = into.data
    while rest:
        count = file.readinto(rest)
        if not count:
            raise DamagedError("it is truncated")
        rest = rest[count:]
