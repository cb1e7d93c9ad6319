"""torchao's tensors in the files that transformers writes: safetensors with what they are in the header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig

from torch_armllm.quant.formats.folder import open_tensors, weight_files
from torch_armllm.quant.formats.foreign import Foreign, without_quantisation
from torch_armllm.quant.formats.nibbles import integers, with_middles
from torch_armllm.quant.formats.weights import Integers, Lazy
from torch_armllm.quant.workers import each


def read(place: str, config: PreTrainedConfig, settings: dict[str, Any]) -> Foreign:
    """Opens a folder that transformers saved with torchao's tensors in it.

    Raises:
        ValueError: a tensor is of a kind that cannot be read, or the files are pickled.
    """
    files = weight_files(place)
    if not files[0].endswith(".safetensors"):
        raise ValueError(
            "its tensors are pickled objects of torchao: save the model anew by a transformers and a torchao "
            "that write safetensors"
        )
    weights = open_tensors(place)
    notes: list[str] = []
    for name, description in _descriptions(files).items():
        kind = description["_type"]
        if kind == "Tensor":
            continue
        if kind not in _KINDS:
            raise ValueError(f"{name} is a {kind}; {', '.join(_KINDS)} can be read")
        module, _, attribute = name.rpartition(".")
        own = {
            part: weights.pop(f"{module}._{attribute}_{part}")
            for part in description["_tensor_data_names"]
            if f"{module}._{attribute}_{part}" in weights
        }
        weights[name] = _lazily(name, kind, description["_data"], own)
        if "act_quant_scale" in own and not notes:
            notes.append("activations have a scale for each token, not the static ones of the checkpoint")
    return Foreign("torchao", place, without_quantisation(config), weights, notes)


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


def _lazily(name: str, kind: str, data: Mapping[str, Any], own: Mapping[str, Any]) -> Lazy:
    def read_tensor() -> Integers:
        try:
            tensors = {part: tensor[...] for part, tensor in own.items()}
            return each(lambda parts: _KINDS[kind](data, parts), [tensors])[0]  # on one thread: small ops
        except KeyError as missing:
            raise ValueError(f"{name} lacks its {missing.args[0]}: a file is missing or damaged") from None
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    return Lazy(read_tensor)


def _int8(data: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Integers:
    """``Int8Tensor``: int8 (N, K) with a scale a row or one for all."""
    if "act_pre_scale" in parts:
        raise ValueError("its inputs are scaled before they are quantised (act_pre_scale)")
    return _plain(parts["qdata"], parts["scale"], parts.get("zero_point"), data["block_size"], 8)


def _unpacked(data: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Integers:
    """``IntxUnpackedToInt8Tensor``: small integers one a byte, with a scale a block."""
    target = data["target_dtype"]
    target = target["_data"] if isinstance(target, dict) else str(target)
    if target not in ("int4", "int8"):
        raise ValueError(f"its values are {target}; int4 and int8 can be read")
    return _plain(parts["qdata"], parts["scale"], parts["zero_point"], data["block_size"], int(target[3:]))


def _int4(data: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Integers:
    """``Int4Tensor``: two columns a byte, scales (S, N), and floats that are added where these are not 0."""
    if "act_pre_scale" in parts:
        raise ValueError("its inputs are scaled before they are quantised (act_pre_scale)")
    packed = parts["qdata"].view(torch.uint8)
    q = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).to(torch.int8)
    q = torch.where(q > 7, q - 16, q)
    found = integers(q, parts["scale"].t(), None, int(data["block_size"][-1]))
    middles = parts["zero_point"].t()
    if not bool(middles.any()):
        return found
    return with_middles(found, middles)


def _plain(q: Tensor, scales: Tensor, zeros: Tensor | None, block: list[int], bits: int) -> Integers:
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
    return integers(q, scales, zeros, int(block[1]), None, bits)


_KINDS = {"Int8Tensor": _int8, "IntxUnpackedToInt8Tensor": _unpacked, "Int4Tensor": _int4}
