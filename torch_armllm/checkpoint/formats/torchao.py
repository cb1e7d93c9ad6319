"""torchao's tensors as transformers writes them: in safetensors whose headers describe them, or pickled."""

from __future__ import annotations

import importlib
import json
import pickle
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedConfig

from torch_armllm.checkpoint.formats.base import Foreign, without_quantization
from torch_armllm.checkpoint.formats.bit_unpacking import integers, with_offsets
from torch_armllm.checkpoint.formats.integer_weight import Integers, Lazy
from torch_armllm.checkpoint.formats.requantized import Rounded
from torch_armllm.checkpoint.formats.tensor_files import open_tensors, weight_files
from torch_armllm.quant.parallel import each


def read(place: str, config: PreTrainedConfig, settings: dict[str, Any]) -> Foreign:
    """Opens a folder that transformers saved with torchao's tensors in it.

    Raises:
        ImportError: the tensors are pickled, and torchao is missing.
        ValueError: a tensor is of a kind that cannot be read.
    """
    files = weight_files(place)
    if files[0].endswith(".safetensors"):
        weights = open_tensors(place)
        found = _described(weights, files)
    else:
        weights = _unpickled(place)
        found = _objects(weights)
    notes: list[str] = []
    rounded = Rounded()
    for name, kind, data, own in found:
        if kind not in _KINDS:
            raise ValueError(f"{name} is a {kind}; {', '.join(_KINDS)} can be read")
        weights[name] = _lazily(name, kind, data, own, rounded)
        if "act_quant_scale" in own and not notes:
            notes.append("activations have a scale for each token, not the static ones of the checkpoint")
    return Foreign("torchao", place, without_quantization(config), weights, notes, rounded=rounded)


_Stored = tuple[str, str, dict[str, Any], dict[str, Any]]
"""A tensor's name, its class, what is known of it, and what it consists of."""


def _described(weights: dict[str, Any], files: list[str]) -> list[_Stored]:
    """What the headers of the files describe; the parts are taken out of the weights."""
    found = []
    for name, description in _descriptions(files).items():
        if description["_type"] == "Tensor":
            continue
        module, _, attribute = name.rpartition(".")
        own = {
            part: weights.pop(f"{module}._{attribute}_{part}")
            for part in description["_tensor_data_names"]
            if f"{module}._{attribute}_{part}" in weights
        }
        found.append((name, description["_type"], description["_data"], own))
    return found


def _unpickled(place: str) -> dict[str, Any]:
    try:
        importlib.import_module("torchao.quantization")  # declares which of its classes may be unpickled
    except ImportError:
        raise ImportError(
            "the tensors are pickled objects of torchao, which is missing: pip install torchao"
        ) from None
    try:
        return open_tensors(place)
    except (pickle.UnpicklingError, AttributeError) as error:
        raise ValueError(
            "its tensors are pickled objects of classes that the torchao here does not have: save the model "
            "anew by a transformers and a torchao that write safetensors"
        ) from error


def _objects(weights: Mapping[str, Any]) -> list[_Stored]:
    """What was pickled as an object of its own."""
    found = []
    for name, value in weights.items():
        if type(value) in (Tensor, Parameter):
            continue
        parts = (*getattr(value, "tensor_data_names", ()), *getattr(value, "optional_tensor_data_names", ()))
        own = {part: getattr(value, part) for part in parts if getattr(value, part, None) is not None}
        target = str(getattr(value, "target_dtype", "")).removeprefix("torch.")
        data = {"block_size": list(getattr(value, "block_size", ())), "target_dtype": target}
        found.append((name, type(value).__name__, data, own))
    return found


def _descriptions(files: list[str]) -> dict[str, Any]:
    """What the headers say of each tensor, by its name."""
    found: dict[str, str] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            found.update(opened.metadata() or {})
    names = json.loads(found.get("tensor_names", "[]")) or [name for name in found if "." in name]
    if not names:
        raise ValueError("the headers of its files do not say which tensors are torchao's")
    return {name: json.loads(found[name]) for name in names if name in found}


def _lazily(name: str, kind: str, data: Mapping[str, Any], own: Mapping[str, Any], rounded: Rounded) -> Lazy:
    def read_tensor() -> Integers:
        try:
            tensors = {part: tensor[...] for part, tensor in own.items()}
            decode = partial(_KINDS[kind], data, rounded=rounded)
            return each(decode, [tensors])[0]  # on one thread: small ops
        except KeyError as missing:
            raise ValueError(f"{name} lacks its {missing.args[0]}: a file is missing or damaged") from None
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    return Lazy(read_tensor)


def _int8(data: Mapping[str, Any], parts: Mapping[str, Tensor], rounded: Rounded) -> Integers:
    """``Int8Tensor``: int8 (N, K) with a scale a row or one for all."""
    if "act_pre_scale" in parts:
        raise ValueError("its inputs are scaled before they are quantized (act_pre_scale)")
    return _plain(parts["qdata"], parts["scale"], parts.get("zero_point"), data["block_size"], 8, rounded)


def _unpacked(data: Mapping[str, Any], parts: Mapping[str, Tensor], rounded: Rounded) -> Integers:
    """``IntxUnpackedToInt8Tensor``: small integers one a byte, with a scale a block."""
    target = data["target_dtype"]
    target = target["_data"] if isinstance(target, dict) else str(target)
    if target not in ("int4", "int8"):
        raise ValueError(f"its values are {target}; int4 and int8 can be read")
    bits = int(target[3:])
    return _plain(parts["qdata"], parts["scale"], parts["zero_point"], data["block_size"], bits, rounded)


def _int4(data: Mapping[str, Any], parts: Mapping[str, Tensor], rounded: Rounded) -> Integers:
    """``Int4Tensor``: two columns a byte, scales (S, N), and floats that are added where these are not 0."""
    if "act_pre_scale" in parts:
        raise ValueError("its inputs are scaled before they are quantized (act_pre_scale)")
    packed = parts["qdata"].view(torch.uint8)
    q = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).to(torch.int8)
    q = torch.where(q > 7, q - 16, q)
    found = integers(q, parts["scale"].t(), None, int(data["block_size"][-1]), rounded)
    offsets = parts["zero_point"].t()
    if not bool(offsets.any()):
        return found
    return with_offsets(found, offsets)


def _plain(
    q: Tensor, scales: Tensor, zeros: Tensor | None, block: list[int], bits: int, rounded: Rounded
) -> Integers:
    if q.dim() != 2 or q.dtype != torch.int8:
        raise ValueError(f"its integers are {q.dtype} of shape {tuple(q.shape)}, and int8 (N, K) can be read")
    rows, columns = q.shape
    if block[0] not in (1, rows):
        raise ValueError(f"blocks of {block[0]} rows share a scale; one row or all of them can be read")
    count = -(-columns // int(block[1]))
    scales = scales.reshape(-1, count).expand(rows, count)
    if zeros is not None:
        if zeros.is_floating_point() and not bool((zeros == zeros.round()).all()):
            raise ValueError("its zero points are not integers")
        zeros = zeros.to(torch.int16).reshape(-1, count).expand(rows, count) if bool(zeros.any()) else None
    return integers(q, scales, zeros, int(block[1]), rounded, None, bits)


_KINDS = {"Int8Tensor": _int8, "IntxUnpackedToInt8Tensor": _unpacked, "Int4Tensor": _int4}
