"""The headers of a checkpoint's safetensors files: what each tensor is, before a byte of it is read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes that may be converted to one another."""
INTEGERS = "integers"
"""In the place of a dtype: a weight that several tensors of a quantizing tool stand for."""
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TensorHeader:
    """A file's description of one of its tensors.

    Attributes:
        file: the file that holds the tensor.
        dtype: as safetensors names it, such as ``BF16``.
        shape: the tensor's sizes.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, file: str, tensor: Tensor) -> TensorHeader:
        """Returns the header that a tensor would have."""
        return cls(file, _DTYPES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))

    @property
    def is_float(self) -> bool:
        """True for the floats of a model; narrower ones are integers of a format."""
        return self.dtype in FLOATS


def read_headers(files: Sequence[str | Path]) -> dict[str, TensorHeader]:
    """Returns the headers of all tensors by name; files of pickled tensors are skipped.

    safetensors checks that offsets neither overlap nor leave gaps, and that they match shapes and dtypes.

    Raises:
        ValueError: a file is damaged, or two files hold the same tensor.
        OSError: a file cannot be read.
    """
    found: dict[str, TensorHeader] = {}
    for file in files:
        if Path(file).suffix != ".safetensors":
            continue
        for name, header in _headers_of(str(file)).items():
            if name in found:
                raise ValueError(
                    f"{name} is in {found[name].file} and in {file}: one file holds each tensor; remove the "
                    "file that belongs to another checkpoint"
                )
            found[name] = header
    return found


def read_tensor(header: TensorHeader, name: str) -> Tensor:
    """Reads a tensor of a safetensors file."""
    with safe_open(header.file, framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(name)
        return tensor


def _headers_of(file: str) -> dict[str, TensorHeader]:
    with open(file, "rb"):
        pass  # safetensors says that a file is missing if it must not be read
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: TensorHeader(file, str(one.get_dtype()), tuple(one.get_shape()))
                for name, one in slices.items()
            }
    except Exception as error:  # safetensors does not export its error class
        raise ValueError(f"{file} is damaged or cut short ({error}): copy or download it again") from error


def sort_metadata(file: str | Path) -> None:
    """Sorts the metadata of a safetensors file by key, in place.

    The library writes them in random order, so that files of equal content differ.
    """
    with open(file, "r+b") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
        metadata = dict(sorted(header.pop("__metadata__", {}).items()))
        text = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":"), ensure_ascii=False)
        content = text.encode().ljust(size)
        if len(content) == size:  # the same entries with the same separators
            stream.seek(8)
            stream.write(content)
