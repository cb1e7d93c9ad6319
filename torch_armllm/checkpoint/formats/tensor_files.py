"""The tensors of a transformers folder, found by name and read when they are asked for."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)

from torch_armllm.checkpoint.formats.base import Foreign, without_quantization
from torch_armllm.checkpoint.formats.expert_merging import fit_experts
from torch_armllm.checkpoint.formats.integer_weight import Integers, Lazy, stacked
from torch_armllm.checkpoint.formats.requantized import Rounded
from torch_armllm.checkpoint.layer_loader import check_files
from torch_armllm.quant.parallel import each

_KINDS = ((SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME), (WEIGHTS_INDEX_NAME, WEIGHTS_NAME))


class Packing(ABC):
    """How a tool stores a quantized module: which tensors, and what they mean.

    Attributes:
        marker: the last part of the name of a tensor that every quantized module has.
        parts: of all tensors that such a module may have beside it; a bias is none of them.
        rounded: what no scheme holds as it is.
    """

    marker: str
    parts: tuple[str, ...]

    def __init__(self) -> None:
        self.rounded = Rounded()

    @abstractmethod
    def decode(self, name: str, parts: Mapping[str, Tensor]) -> Integers:
        """The integers of the module ``name``, from its tensors by the last part of their names.

        Raises:
            ValueError: they do not fit one another, or there is no scheme that holds them.
        """

    def renamed(self, name: str, names: Collection[str]) -> str:
        """What a tensor would be called in a module of its own; ``names`` are those of all tensors."""
        return name


def read_folder(place: str, config: PreTrainedConfig, method: str, packing: Packing) -> Foreign:
    """Opens the checkpoint of a tool that stores a quantized module as several tensors.

    Tensors with one more axis hold all experts of a layer.

    Raises:
        ValueError: there is no file, a file is damaged, or a module lacks one of its tensors.
    """
    found = open_tensors(place)
    tensors = {packing.renamed(name, found): tensor for name, tensor in found.items()}
    quantized = {
        name.removesuffix(f".{packing.marker}") for name in tensors if name.endswith(f".{packing.marker}")
    }
    if not quantized:
        raise ValueError(f"no tensor is called ….{packing.marker}: config.json belongs to another checkpoint")
    weights = dict(tensors)
    joined = []
    for name in sorted(quantized):
        own = {
            part: weights.pop(f"{name}.{part}")
            for part in (packing.marker, *packing.parts)
            if f"{name}.{part}" in weights
        }
        if any(len(_shape(part)) > 2 for part in own.values()):
            weights[name] = _lazily(packing, name, own, _decode_all)
            joined.append(name)
        else:
            weights[f"{name}.weight"] = _lazily(packing, name, own, _decode_one)
    plain = without_quantization(config)
    fit_experts(plain, weights, joined)
    return Foreign(method, place, plain, weights, rounded=packing.rounded)


def _shape(tensor: Any) -> Sequence[int]:
    """Of a tensor or of a safetensors slice."""
    return tensor.shape if isinstance(tensor, Tensor) else list(tensor.get_shape())


def _lazily(
    packing: Packing,
    name: str,
    own: dict[str, Any],
    decode: Callable[[Packing, str, dict[str, Tensor]], Integers],
) -> Lazy:
    def read() -> Integers:
        try:
            return decode(packing, name, {part: tensor[...] for part, tensor in own.items()})
        except KeyError as missing:
            raise ValueError(f"{name}.{missing.args[0]} is missing: a file is, or it is damaged") from None
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    return Lazy(read)


def _decode_one(packing: Packing, name: str, parts: dict[str, Tensor]) -> Integers:
    return each(lambda own: packing.decode(name, own), [parts])[0]  # on one thread: small ops


def _decode_all(packing: Packing, name: str, parts: dict[str, Tensor]) -> Integers:
    """The matrices of all experts: numbers about all of them have one axis, and are no floats."""
    count = max(parts.values(), key=Tensor.dim).shape[0]
    apart = {
        part
        for part, tensor in parts.items()
        if len(tensor) == count and (tensor.dim() > 1 or tensor.is_floating_point())
    }
    experts = [
        {part: tensor[number] if part in apart else tensor for part, tensor in parts.items()}
        for number in range(count)
    ]
    return stacked(each(lambda own: packing.decode(name, own), experts))


def open_tensors(place: str) -> dict[str, Any]:
    """Every tensor of a folder or of a model on the hub, by name: safetensors slices, or mapped tensors.

    Raises:
        ValueError: there is no file of weights, or one is damaged.
    """
    files = weight_files(place)
    check_files(files)
    found: dict[str, Any] = {}
    for file in files:
        if file.endswith(".safetensors"):
            opened: Any = safe_open(file, framework="pt")
            found.update({name: opened.get_slice(name) for name in opened.keys()})  # noqa: SIM118
        else:
            found.update(torch.load(file, map_location="cpu", weights_only=True, mmap=True))
    return found


def weight_files(place: str) -> list[str]:
    """The files that hold a checkpoint's weights.

    Raises:
        ValueError: there are none.
    """
    for index_name, single in _KINDS:
        index = _file(place, index_name)
        if index is not None:
            names = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
            files = {name: _file(place, name) for name in names}
            missing = [name for name, file in files.items() if file is None]
            if missing:
                raise ValueError(f"{missing[0]} is named in {index_name} and missing: download it again")
            return [file for file in files.values() if file is not None]
        file = _file(place, single)
        if file is not None:
            return [file]
    raise ValueError(f"there is no {SAFE_WEIGHTS_NAME}, {SAFE_WEIGHTS_INDEX_NAME} or {WEIGHTS_NAME}")


def _file(place: str, name: str) -> str | None:
    found: str | None = cached_file(
        place,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return found
