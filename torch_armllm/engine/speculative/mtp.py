"""Multi-token prediction: the layers that some checkpoints carry after their last one, to draft tokens."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from torch_armllm.checkpoint.load import resolve
from torch_armllm.checkpoint.tensor_headers import TensorHeader, read_headers
from torch_armllm.checkpoint.weight_files import SAFETENSORS, read_index, weight_files
from torch_armllm.engine.speculative.draft_layer import DraftHead, DraftLayer, DraftLayers
from torch_armllm.engine.speculative.draft_modules import (
    DraftBase,
    dtype_of,
    hidden_size_of,
    one_layer,
    plan_of,
    quantize_like,
)
from torch_armllm.hf.base_model import base_model_of
from torch_armllm.plan.servable_model import ServableModel

_MERGE = ("enorm.weight", "hnorm.weight", "eh_proj.weight")
"""Names of the tensors that join embeddings and hidden states."""
_QWEN = {
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
    "fc.weight": "eh_proj.weight",
    "norm.weight": "norm.weight",
}
_DEEPSEEK = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "shared_head.norm.weight": "norm.weight",
}
_SHARED = ("shared_head.head.", "embed_tokens.")
"""Copies of the model's own weights."""
_SCALES = "_scale_inv"
_BLOCK = 128
"""Rows and columns of an FP8 weight that share a scale."""


@dataclass
class _Place:
    """The place of one of a checkpoint's layers for multi-token prediction.

    Attributes:
        prefix: beginning of the layer's names.
        renamed: its own tensors; the others are those of a decoder layer.
        norms_at_head: True if the final norm belongs to the head, and the next token's layer reads hidden
            states before it.
    """

    prefix: str
    renamed: dict[str, str]
    norms_at_head: bool

    def name(self, found: str) -> str | None:
        """Returns the name of a tensor in a model with one layer; None for tensors of others."""
        if not found.startswith(self.prefix):
            return None
        rest = found.removeprefix(self.prefix)
        if rest in self.renamed:
            return self.renamed[rest]
        if rest.startswith(_SHARED):
            return None
        if not self.norms_at_head:  # the layers have numbers
            return rest if rest.startswith("layers.0.") else None
        return f"layers.0.{rest}"


def find_layers(names: Iterable[str], layers: int) -> list[_Place]:
    """Returns the places of the layers for multi-token prediction; none if the checkpoint has none.

    Args:
        names: of the checkpoint's tensors.
        layers: number of the model's decoder layers.
    """
    prefixes: dict[int, str] = {}
    for name in names:
        if name.endswith("mtp.fc.weight"):
            return [_Place(name.removesuffix("fc.weight"), _QWEN, False)]
        prefix = name.removesuffix("eh_proj.weight")
        number = prefix.split(".")[-2:-1]
        if prefix != name and number and number[0].isdecimal():
            prefixes[int(number[0])] = prefix
    numbers = itertools.takewhile(prefixes.__contains__, itertools.count(layers))
    return [_Place(prefixes[number], _DEEPSEEK, True) for number in numbers]


def carries_layer(folder: Path, layers: int) -> bool:
    """True if a folder holds a layer for multi-token prediction; False for hub names and other formats.

    Args:
        folder: of a checkpoint.
        layers: number of the model's decoder layers.
    """
    index, single = folder / SAFE_WEIGHTS_INDEX_NAME, folder / SAFE_WEIGHTS_NAME
    names: Iterable[str] = ()
    if single.is_file():
        names = read_headers([single])
    elif index.is_file():
        names = read_index(index)["weight_map"]
    return bool(find_layers(names, layers))


class _Merge(nn.Module):
    def __init__(self, norm: nn.Module, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.enorm, self.hnorm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False, dtype=dtype)

    def forward(self, embeddings: Tensor, given: Tensor) -> Tensor:
        joined = torch.cat([self.enorm(embeddings), self.hnorm(given)], -1)
        merged: Tensor = self.eh_proj(joined)
        return merged


def mtp_layers(model: Any, servable: ServableModel, source: str | None, most: int) -> DraftLayers:
    """Builds the draft layers that a model's checkpoint carries.

    Args:
        model: a patched model.
        servable: the same as the engine serves it.
        source: a folder or hub name with the weights; None: that of the model.
        most: tokens of a draft; there are no more layers.

    Raises:
        ValueError: the checkpoint has no such layer, or its sizes are not the model's.
        OSError: the checkpoint is not found.
    """
    head, layers = DraftHead(servable.head, servable.vocab_size), []
    for base in mtp_modules(model, source, most):
        quantize_like(model, base)
        plan, shape = plan_of(base, model)
        layers.append(DraftLayer(plan, shape, head, *base.columns_of_rows))
    return DraftLayers(tuple(layers), lambda kept: kept, range(hidden_size_of(model)))


def mtp_modules(model: Any, source: str | None, most: int) -> Iterator[DraftBase]:
    """Builds the modules of the draft layers, without the embedding, and loads their weights.

    transformers leaves these weights out, so they are read from the folder.

    Args:
        model: see `mtp_layers`.
        source: see `mtp_layers`.
        most: see `mtp_layers`.
    """
    source = source or str(model.name_or_path)
    base = _decoder_of(model)
    layers = base.config.num_hidden_layers
    in_files = bool(source) and not Path(source).is_file()  # a GGUF file has no such layer
    headers = read_headers(weight_files(resolve(source), SAFETENSORS)) if in_files else {}
    places = find_layers(headers, layers)
    if not places:
        raise ValueError(
            f"{source or 'this model, which was loaded from no folder,'} has no layer for multi-token "
            f"prediction: neither mtp.fc nor a layer {layers} with eh_proj. Name the original checkpoint's "
            'folder, {"method": "mtp", "model": FOLDER}, or choose another method'
        )
    for place in places[:most]:
        yield _modules(model, source, headers, place)


def _modules(model: Any, source: str, headers: Mapping[str, TensorHeader], place: _Place) -> DraftBase:
    base, size, dtype = _decoder_of(model), hidden_size_of(model), dtype_of(model)
    shape = headers[f"{place.prefix}{_projection(place)}"].shape
    if shape != (size, 2 * size):
        raise ValueError(
            f"the layer for multi-token prediction of {source} joins rows by a matrix of {shape}, and the "
            f"model's hidden size is {size}: name the folder that belongs to this model"
        )
    tensors = _read(headers, place, dtype)
    tensors["embed_tokens.weight"] = torch.zeros(1, size, dtype=dtype)
    own = {name: tensors.pop(name) for name in _MERGE if name in tensors}
    config = one_layer(base.config)
    stack, report = type(base).from_pretrained(
        None, config=config, state_dict=tensors, dtype=dtype, output_loading_info=True
    )
    merge = _Merge(stack.norm, size, dtype)
    missing = [name for name in _MERGE if name not in own] + sorted(report["missing_keys"])
    if missing:
        raise ValueError(
            f"{source} lacks {missing[0]} of its layer for multi-token prediction: download it again"
        )
    merge.load_state_dict(own)
    modules = DraftBase(merge, stack, size, dtype)
    if place.norms_at_head:  # the next token is drafted from the hidden states before it
        modules.head_norm, stack.norm = stack.norm, nn.Identity()
    return modules


def _decoder_of(model: Any) -> Any:
    """Returns the base model, or the part of it that is a language model, where it takes pictures too."""
    base = base_model_of(model)
    return getattr(base, "language_model", base)


def _projection(place: _Place) -> str:
    return next(name for name, new in place.renamed.items() if new == "eh_proj.weight")


def _read(headers: Mapping[str, TensorHeader], place: _Place, dtype: torch.dtype) -> dict[str, Tensor]:
    """Reads the tensors of the layer by their names in a model with one layer; FP8 weights become floats."""
    tensors: dict[str, Tensor] = {}
    for found, header in headers.items():
        name = place.name(found)
        if name is None or found.endswith(_SCALES):
            continue
        tensor = _tensor(header, found)
        scales = headers.get(found + _SCALES)
        if scales is not None:
            factors = _tensor(scales, found + _SCALES).float()
            factors = factors.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
            tensor = (tensor.float() * factors[: tensor.shape[0], : tensor.shape[1]]).to(dtype)
        tensors[name] = tensor.to(dtype) if tensor.is_floating_point() and tensor.dim() > 1 else tensor
    return tensors


def _tensor(header: TensorHeader, name: str) -> Tensor:
    with safe_open(header.file, "pt") as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor
