"""What a reader gives of a checkpoint that another tool quantized."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from torch_armllm.checkpoint.formats.integer_weight import Lazy
from torch_armllm.checkpoint.formats.requantized import Rounded


@dataclass
class Foreign:
    """An opened checkpoint.

    Attributes:
        method: what quantized it, such as ``gptq``.
        place: the folder, file or name that it was opened from.
        config: of the model, without a ``quantization_config``.
        weights: by the names that they have in a float checkpoint: a tensor or a safetensors slice of what is
            not quantized, a `Lazy` that reads `Integers` of what is.
        notes: for the report: what is not computed exactly as the checkpoint asks.
        rounded: what was rounded once more; it is not known before the weights are read.
        decoded: there are no `Integers` among the weights, but the floats that they stand for.
    """

    method: str
    place: str
    config: PreTrainedConfig
    weights: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    decoded: bool = False
    rounded: Rounded = field(default_factory=Rounded)


def as_floats(foreign: Foreign) -> Foreign:
    """A checkpoint with the floats that its integers stand for, each decoded when it is read."""

    def floats(weight: Lazy) -> Lazy:
        def read() -> Tensor:
            found = weight[...]
            return found if isinstance(found, Tensor) else found.as_type(torch.float32)

        return Lazy(read)

    weights = {n: floats(w) if isinstance(w, Lazy) else w for n, w in foreign.weights.items()}
    return replace(foreign, weights=weights, decoded=True)


def without_quantization(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of a configuration that does not say that the weights are quantized."""
    plain = copy.deepcopy(config)
    for part in (plain, plain.get_text_config(decoder=True)):
        part.__dict__.pop("quantization_config", None)
    return plain
