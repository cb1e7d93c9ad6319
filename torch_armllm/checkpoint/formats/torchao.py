"""torchao's tensors as transformers saves them: described in safetensors headers, or pickled."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedConfig

from torch_armllm.checkpoint.formats.bit_unpacking import integer_weight, with_offsets
from torch_armllm.checkpoint.formats.integer_weight import IntegerWeight, LazyWeight
from torch_armllm.checkpoint.formats.requantizer import Requantizer
from torch_armllm.checkpoint.formats.settings import group_count, mapping
from torch_armllm.checkpoint.formats.tensor_files import open_tensors
from torch_armllm.checkpoint.formats.third_party_checkpoint import ThirdPartyCheckpoint, without_quantization
from torch_armllm.checkpoint.weight_files import weight_files
from torch_armllm.quant.layers import FLOATS
from torch_armllm.quant.parallel import each


def read(source: str, config: PreTrainedConfig, settings: dict[str, Any]) -> ThirdPartyCheckpoint:
    """Opens a checkpoint that transformers saved from a model with torchao's tensors.

    Raises:
        ImportError: the tensors are pickled, and torchao is missing.
        ValueError: a tensor is of a class that is not supported.
    """
    files = weight_files(source)
    if files[0].suffix != ".safetensors":
        _require_torchao()
    weights, headers = open_tensors(source)
    entries = _described(weights, files) if files[0].suffix == ".safetensors" else _objects(weights)
    notes: list[str] = []
    requantizer = Requantizer()
    for name, kind, data, own in entries:
        if kind not in _KINDS:
            raise ValueError(f"{name} is a {kind}; {', '.join(_KINDS)} can be read")
        weights[name] = _lazy_weight(name, kind, data, own, requantizer)
        headers.pop(name, None)
        if "act_quant_scale" in own and not notes:
            notes.append("activations have a scale for each token, not the static ones of the checkpoint")
    stored = {name: header for name, header in headers.items() if name in weights}
    return ThirdPartyCheckpoint(
        "torchao",
        source,
        without_quantization(config),
        weights,
        notes,
        requantizer=requantizer,
        stored=stored,
    )


_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
_T = TypeVar("_T")
_Entry = tuple[str, str, dict[str, Any], dict[str, Any]]
"""A tensor's name, its class, its metadata, and its parts by name."""


def _described(weights: dict[str, Any], files: list[Path]) -> list[_Entry]:
    """Returns the tensors that the files' headers describe, and removes their parts from ``weights``."""
    entries = []
    for name, description in _descriptions(files).items():
        kind = description.get("_type")
        if kind == "Tensor":
            continue
        data, parts = mapping(description, "_data"), description.get("_tensor_data_names")
        if not isinstance(kind, str) or not isinstance(parts, list):
            raise ValueError(
                f"the headers describe {name} by {description!r}, which is no tensor of torchao's"
            )
        module, _, attribute = name.rpartition(".")
        own = {
            part: weights.pop(f"{module}._{attribute}_{part}")
            for part in parts
            if f"{module}._{attribute}_{part}" in weights
        }
        entries.append((name, kind, dict(data), own))
    return entries


def _require_torchao() -> None:
    try:
        importlib.import_module("torchao.quantization")  # registers the classes that torch.load may unpickle
    except ImportError:
        raise ImportError(
            "the tensors are pickled objects of torchao, which is not installed: pip install torchao"
        ) from None


def _objects(weights: Mapping[str, Any]) -> list[_Entry]:
    """Returns the tensors that were pickled as objects of torchao's classes."""
    entries = []
    for name, value in weights.items():
        if type(value) in (Tensor, Parameter):
            continue
        parts = (*getattr(value, "tensor_data_names", ()), *getattr(value, "optional_tensor_data_names", ()))
        own = {part: getattr(value, part) for part in parts if getattr(value, part, None) is not None}
        target = str(getattr(value, "target_dtype", "")).removeprefix("torch.")
        data = {"block_size": list(getattr(value, "block_size", ())), "target_dtype": target}
        entries.append((name, type(value).__name__, data, own))
    return entries


def _descriptions(files: list[Path]) -> dict[str, Any]:
    """Returns each tensor's description in the headers, by name."""
    metadata: dict[str, str] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            metadata.update(opened.metadata() or {})
    names = _json("tensor_names", metadata.get("tensor_names", "[]"), list)
    names = names or [name for name in metadata if "." in name]
    if not names:
        raise ValueError("the headers of its files do not say which tensors are torchao's")
    known = [name for name in names if isinstance(name, str) and name in metadata]
    return {name: _json(name, metadata[name], dict) for name in known}


def _json(name: str, text: str, kind: type[_T]) -> _T:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the entry {name} of a file's header is no JSON ({error})") from error
    if not isinstance(value, kind):
        raise ValueError(
            f"the entry {name} of a file's header is {value!r}, and a {kind.__name__} is expected"
        )
    return value


def _lazy_weight(
    name: str, kind: str, data: Mapping[str, Any], own: Mapping[str, Any], requantizer: Requantizer
) -> LazyWeight:
    def read_tensor() -> IntegerWeight:
        try:
            tensors = {part: tensor[...] for part, tensor in own.items()}
            decode = partial(_KINDS[kind], data, requantizer=requantizer)
            return each(decode, [tensors])[0]  # one thread: the ops are small
        except KeyError as missing:
            raise ValueError(f"{name} lacks its {missing.args[0]}: a file is missing or damaged") from None
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    return LazyWeight(read_tensor)


def _int8(data: Mapping[str, Any], parts: Mapping[str, Tensor], requantizer: Requantizer) -> IntegerWeight:
    """``Int8Tensor``: int8 (N, K) with a scale a row or one for all."""
    if "act_pre_scale" in parts:
        raise ValueError("its inputs are scaled before they are quantized (act_pre_scale)")
    return _plain(parts["qdata"], parts["scale"], parts.get("zero_point"), _block_of(data), 8, requantizer)


def _unpacked(
    data: Mapping[str, Any], parts: Mapping[str, Tensor], requantizer: Requantizer
) -> IntegerWeight:
    """``IntxUnpackedToInt8Tensor``: small integers one a byte, with a scale a block."""
    target = data.get("target_dtype")
    target = target.get("_data") if isinstance(target, dict) else str(target)
    if target not in ("int4", "int8"):
        raise ValueError(f"its values are {target}; int4 and int8 can be read")
    bits = int(target[3:])
    return _plain(parts["qdata"], parts["scale"], parts["zero_point"], _block_of(data), bits, requantizer)


def _int4(data: Mapping[str, Any], parts: Mapping[str, Tensor], requantizer: Requantizer) -> IntegerWeight:
    """Decodes an ``Int4Tensor``: two columns per byte, scales (S, N), float offsets unless all are 0."""
    if "act_pre_scale" in parts:
        raise ValueError("its inputs are scaled before they are quantized (act_pre_scale)")
    stored, scale, offset = parts["qdata"], parts["scale"], parts["zero_point"]
    if stored.dim() != 2 or stored.dtype not in (torch.int8, torch.uint8):
        raise ValueError(
            f"its integers are {stored.dtype} of shape {tuple(stored.shape)}, and int8 (N, K/2) can be read"
        )
    rows, columns = stored.shape[0], 2 * stored.shape[1]
    _, size = _block_of(data)
    expected = (group_count(size, columns), rows)
    for name, one in (("scale", scale), ("zero_point", offset)):
        if one.shape != expected or one.dtype not in FLOATS:
            raise ValueError(
                f"its {name} is {one.dtype} of shape {tuple(one.shape)}, and floats {expected} are expected"
            )
    packed = stored.view(torch.uint8)
    q = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).to(torch.int8)
    q = torch.where(q > 7, q - 16, q)
    weight = integer_weight(q, scale.t(), None, size, requantizer)
    offsets = offset.t()
    if not bool(offsets.any()):
        return weight
    return with_offsets(weight, offsets)


def _block_of(data: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the rows and columns that share a scale."""
    block = data.get("block_size")
    if (
        not isinstance(block, (list, tuple))
        or len(block) != 2
        or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in block)
    ):
        raise ValueError(f"its block_size is {block!r}, and two positive numbers are expected")
    return block[0], block[1]


def _plain(
    q: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    block: tuple[int, int],
    bits: int,
    requantizer: Requantizer,
) -> IntegerWeight:
    if q.dim() != 2 or q.dtype != torch.int8:
        raise ValueError(f"its integers are {q.dtype} of shape {tuple(q.shape)}, and int8 (N, K) can be read")
    rows, columns = q.shape
    if block[0] not in (1, rows):
        raise ValueError(f"blocks of {block[0]} rows share a scale; one row or all of them can be read")
    count = group_count(block[1], columns)
    shapes: list[tuple[int, ...]] = [(1, count), (count,)] if block[0] == rows else [(rows, count)]
    if count == 1:
        shapes += [()] if block[0] == rows else [(rows,)]
    for name, one in (("scale", scales), ("zero_point", zeros)):
        if one is not None and (tuple(one.shape) not in shapes or one.dtype not in (*FLOATS, *_INTEGERS)):
            raise ValueError(
                f"its {name} is {one.dtype} of shape {tuple(one.shape)}, and {shapes[0]} is expected"
            )
    if scales.dtype not in FLOATS:
        raise ValueError(f"its scale is {scales.dtype}, and floats are expected")
    scales = scales.reshape(-1, count).expand(rows, count)
    if zeros is not None:
        if zeros.is_floating_point() and not bool((zeros == zeros.round()).all()):
            raise ValueError("its zero points are not integers")
        zeros = zeros.to(torch.int16).reshape(-1, count).expand(rows, count) if bool(zeros.any()) else None
    return integer_weight(q, scales, zeros, block[1], requantizer, None, bits)


_KINDS = {"Int8Tensor": _int8, "IntxUnpackedToInt8Tensor": _unpacked, "Int4Tensor": _int4}
