"""An opened checkpoint that another tool quantized."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from torch_armllm.checkpoint.formats.integer_weight import LazyWeight
from torch_armllm.checkpoint.formats.requantizer import Requantizer
from torch_armllm.checkpoint.tensor_headers import TensorHeader


@dataclass
class ThirdPartyCheckpoint:
    """An opened checkpoint.

    Attributes:
        method: the quantization method, such as ``gptq``.
        source: the folder, file or hub name that it was opened from.
        config: the model's configuration, without a ``quantization_config``.
        weights: by their names in a float checkpoint: a tensor or a safetensors slice where the weight is not
            quantized, else a `LazyWeight` that reads an `IntegerWeight`.
        notes: lines of the report: what is not computed exactly as the checkpoint asks.
        dequantized: quantized weights are read as floats, not as `IntegerWeight`.
        stored: headers of ``weights`` by name, without those that are merged.
        requantizer: weights that no scheme holds; its notes are complete once all weights are read.
    """

    method: str
    source: str
    config: PreTrainedConfig
    weights: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    dequantized: bool = False
    requantizer: Requantizer = field(default_factory=Requantizer)
    stored: dict[str, TensorHeader] = field(default_factory=dict)


def as_floats(checkpoint: ThirdPartyCheckpoint) -> ThirdPartyCheckpoint:
    """Returns a checkpoint whose integer weights are dequantized as they are read."""

    def floats(weight: LazyWeight) -> LazyWeight:
        def read() -> Tensor:
            matrix = weight[...]
            return matrix if isinstance(matrix, Tensor) else matrix.as_type(torch.float32)

        return LazyWeight(read)

    weights = {n: floats(w) if isinstance(w, LazyWeight) else w for n, w in checkpoint.weights.items()}
    return replace(checkpoint, weights=weights, dequantized=True)


def without_quantization(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns a copy of a configuration without its ``quantization_config``."""
    plain = copy.deepcopy(config)
    for part in (plain, plain.get_text_config(decoder=True)):
        part.__dict__.pop("quantization_config", None)
    return plain
