"""The record in the headers of saved files: dtype, shape and checksum of each tensor, schemes of modules."""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from torch_armllm.checkpoint.tensor_headers import TensorHeader, read_headers
from torch_armllm.checkpoint.weight_files import SAFETENSORS, weight_files

_TENSORS = "tensors"
_SCHEMES = "schemes"
_THREADS = 4


def make_record(tensors: Mapping[str, Tensor], modules: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Returns the record as entries of a file's header.

    Args:
        tensors: by their names in the file.
        modules: packed modules by name, as `describe_modules` returns them.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        sums = pool.map(_sum_of, tensors.values())
        headers = {name: TensorHeader.of("", tensor) for name, tensor in tensors.items()}
        rows = {
            name: [header.dtype, list(header.shape), own]
            for (name, header), own in zip(headers.items(), sums, strict=True)
        }
    schemes = {name: module["scheme"] for name, module in modules.items()}
    return {_TENSORS: json.dumps(rows), _SCHEMES: json.dumps(schemes)}


def check_record(
    headers: Mapping[str, TensorHeader], modules: Mapping[str, Mapping[str, Any]] | None
) -> None:
    """Compares dtypes and shapes, and the schemes in ``config.json``, with the record.

    float16 and bfloat16 look alike, and so do schemes whose panels have one size.  Files without a record, of
    an earlier version, are not compared.

    Raises:
        ValueError: something differs, or the record is damaged.
    """
    for file in dict.fromkeys(header.file for header in headers.values()):
        rows, schemes = _entry(file, _TENSORS), _entry(file, _SCHEMES)
        for name, header in headers.items():
            if header.file == file and rows is not None:
                if name not in rows:
                    raise ValueError(
                        f"{file} holds {name}, which was not saved with it: the file is damaged; copy or "
                        "download it again"
                    )
                _compare(
                    f"dtype and shape of {name}", file, _row(rows, name)[:2], [header.dtype, [*header.shape]]
                )
        for name, scheme in (schemes or {}).items():
            said = (modules or {}).get(name, {}).get("scheme")
            if said != scheme:
                raise ValueError(
                    f"config.json says that {name} is of scheme {said!r}, and {file} says {scheme!r}: "
                    "config.json is damaged, or belongs to another checkpoint"
                )


def verify_folder(source: str) -> int:
    """Reads every tensor of a saved folder, and compares its checksum with the recorded one.

    Args:
        source: a folder that this package wrote, or its name on the model hub.

    Returns:
        The number of tensors.

    Raises:
        ValueError: a tensor has changed, or the files have no checksums.
    """
    files = weight_files(source, SAFETENSORS)
    read_headers(files)
    count = 0
    for file in files:
        rows = _entry(str(file), _TENSORS)
        if rows is None:
            raise ValueError(
                f"{file} has no checksums, so it cannot be verified: save the model anew by save_pretrained "
                "or torch-armllm quantize, or load it without verify"
            )
        places = _places(file)
        with (
            file.open("rb") as opened,
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content,
            memoryview(content) as view,
            ThreadPoolExecutor(_THREADS) as pool,
        ):
            sums = list(pool.map(partial(_sum_of_bytes, view), places.values()))
        for name, own in zip(places, sums, strict=True):
            _compare(f"checksum of {name}", str(file), _row(rows, name)[2], own)
        count += len(places)
    return count


def _compare(what: str, file: str, expected: object, found: object) -> None:
    if expected != found:
        raise ValueError(
            f"the {what} in {file} is {found}, and {expected} was saved: the file is damaged; copy or "
            "download it again"
        )


def _row(rows: Mapping[str, Any], name: str) -> list[Any]:
    row = rows.get(name)
    return row if isinstance(row, list) and len(row) == 3 else [None, None, None]


def _entry(file: str, name: str) -> dict[str, Any] | None:
    """Returns an entry of a file's header; None if it has none."""
    with safe_open(file, framework="pt") as opened:
        text = (opened.metadata() or {}).get(name)
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {name} in its header is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} is damaged: {name} in its header is {text[:40]!r}, not an object")
    return found


def _places(file: Path) -> dict[str, tuple[int, int]]:
    """Returns where the bytes of each tensor begin and end; safetensors has checked the header."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    header.pop("__metadata__", None)
    offsets = {name: info["data_offsets"] for name, info in header.items()}
    return {name: (8 + size + begin, 8 + size + end) for name, (begin, end) in offsets.items()}


def _sum_of(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()


def _sum_of_bytes(view: memoryview, place: tuple[int, int]) -> str:
    with view[slice(*place)] as part:
        return hashlib.sha256(part).hexdigest()
