"""The tensors of a transformers checkpoint by name, and readers of modules stored as several tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig

from torch_armllm.checkpoint.formats.expert_merging import fit_experts
from torch_armllm.checkpoint.formats.integer_weight import IntegerWeight, LazyWeight, stacked
from torch_armllm.checkpoint.formats.part_headers import PartHeaders
from torch_armllm.checkpoint.formats.requantizer import Requantizer
from torch_armllm.checkpoint.formats.third_party_checkpoint import ThirdPartyCheckpoint, without_quantization
from torch_armllm.checkpoint.tensor_headers import INTEGERS, TensorHeader, read_headers
from torch_armllm.checkpoint.weight_files import weight_files
from torch_armllm.quant.parallel import each


class ModuleReader(ABC):
    """Decodes a quantized module of a tool's format from its tensors.

    Attributes:
        marker: the last part of the name of a tensor that every quantized module has.
        parts: the last parts of the names of its other tensors, the bias excepted.
        requantizer: rounds weights that no scheme holds.
    """

    marker: str
    parts: tuple[str, ...]

    def __init__(self) -> None:
        self.requantizer = Requantizer()

    @abstractmethod
    def decode(self, name: str, parts: Mapping[str, Tensor]) -> IntegerWeight:
        """Returns the integers of the module ``name``.

        Args:
            name: the module.
            parts: its tensors, by the last part of their names.

        Raises:
            ValueError: the tensors' shapes do not match, or no scheme holds the integers.
        """

    @abstractmethod
    def declared_shape(self, name: str, parts: PartHeaders) -> tuple[int, int]:
        """Returns the shape (N, K) of the module ``name``, after a look at the headers of its tensors.

        Raises:
            ValueError: a tensor is missing, or has another dtype or shape than the format's.
        """

    def renamed(self, name: str, names: Collection[str]) -> str:
        """Returns a tensor's name in the form ``module.part``; ``names`` are those of all tensors."""
        return name


def read_folder(
    source: str, config: PreTrainedConfig, method: str, reader: ModuleReader
) -> ThirdPartyCheckpoint:
    """Opens a checkpoint whose quantized modules consist of several tensors each.

    Tensors with a leading expert axis hold all experts of a layer.

    Raises:
        ValueError: there is no file, a file is damaged, or a module lacks one of its tensors.
    """
    opened, headers = open_tensors(source)
    names = {reader.renamed(name, opened): name for name in opened}
    tensors = {name: opened[own] for name, own in names.items()}
    quantized = {
        name.removesuffix(f".{reader.marker}") for name in tensors if name.endswith(f".{reader.marker}")
    }
    if not quantized:
        raise ValueError(f"no tensor is called ….{reader.marker}: config.json belongs to another checkpoint")
    weights = dict(tensors)
    stored = {name: headers[own] for name, own in names.items()}
    joined = []
    for name in sorted(quantized):
        own = {
            part: weights.pop(f"{name}.{part}")
            for part in (reader.marker, *reader.parts)
            if f"{name}.{part}" in weights
        }
        parts = PartHeaders(name, {part: stored.pop(f"{name}.{part}") for part in own}, own)
        shape = reader.declared_shape(name, parts)
        if parts.experts is not None:
            weights[name] = _lazy_weight(reader, name, own, _decode_all)
            joined.append(name)
        else:
            weights[f"{name}.weight"] = _lazy_weight(reader, name, own, _decode_one)
            file = headers[names[f"{name}.{reader.marker}"]].file
            stored[f"{name}.weight"] = TensorHeader(file, INTEGERS, shape)
    plain = without_quantization(config)
    fit_experts(plain, weights, joined)
    stored = {name: header for name, header in stored.items() if name in weights}
    return ThirdPartyCheckpoint(method, source, plain, weights, requantizer=reader.requantizer, stored=stored)


def _lazy_weight(
    reader: ModuleReader,
    name: str,
    own: dict[str, Any],
    decode: Callable[[ModuleReader, str, dict[str, Tensor]], IntegerWeight],
) -> LazyWeight:
    def read() -> IntegerWeight:
        try:
            return decode(reader, name, {part: tensor[...] for part, tensor in own.items()})
        except KeyError as missing:
            raise ValueError(f"{name}.{missing.args[0]} is missing: a file is missing or damaged") from None
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    return LazyWeight(read)


def _decode_one(reader: ModuleReader, name: str, parts: dict[str, Tensor]) -> IntegerWeight:
    return each(lambda own: reader.decode(name, own), [parts])[0]  # one thread: the ops are small


def _decode_all(reader: ModuleReader, name: str, parts: dict[str, Tensor]) -> IntegerWeight:
    """Decodes the matrices of all experts; one-dimensional integer tensors describe all of them at once."""
    count = max(parts.values(), key=Tensor.dim).shape[0]
    by_expert = {
        part
        for part, tensor in parts.items()
        if len(tensor) == count and (tensor.dim() > 1 or tensor.is_floating_point())
    }
    experts = [
        {part: tensor[number] if part in by_expert else tensor for part, tensor in parts.items()}
        for number in range(count)
    ]
    return stacked(each(lambda own: reader.decode(name, own), experts))


def open_tensors(source: str) -> tuple[dict[str, Any], dict[str, TensorHeader]]:
    """Returns every tensor of a folder or hub name, by name: safetensors slices, or memory-mapped tensors.

    Returns:
        The tensors, and what their files say about them.

    Raises:
        ValueError: there is no file of weights, or a file is damaged.
    """
    files = weight_files(source)
    headers = read_headers(files)
    all_tensors: dict[str, Any] = {}
    for file in files:
        if file.suffix == ".safetensors":
            opened: Any = safe_open(file, framework="pt")
            all_tensors.update({name: opened.get_slice(name) for name in opened.keys()})  # noqa: SIM118
        else:
            tensors = _unpickle(file)
            all_tensors.update(tensors)
            headers.update({name: TensorHeader.of(str(file), one) for name, one in tensors.items()})
    return all_tensors, headers


def _unpickle(file: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever the pickle's bytes lead to
        said = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{file} is damaged, or its tensors are pickled objects of classes that the installed torchao "
            f"does not have ({said}): download it again, or save the model again with a transformers and a "
            "torchao that write safetensors"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(one, Tensor) for one in found.values()):
        raise ValueError(f"{file} holds a {type(found).__name__}, and tensors by name are expected")
    return found
