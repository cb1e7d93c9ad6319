"""What a reader gives of a checkpoint that another tool quantised."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig


@dataclass
class Foreign:
    """An opened checkpoint.

    Attributes:
        method: what quantised it, such as ``gptq``.
        place: the folder, file or name that it was opened from.
        config: of the model, without a ``quantization_config``.
        weights: by the names that they have in a float checkpoint: a tensor or a safetensors slice of what is
            not quantised, a `Lazy` that reads `Integers` of what is.
        notes: for the report: what is not computed exactly as the checkpoint asks.
    """

    method: str
    place: str
    config: PreTrainedConfig
    weights: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def without_quantisation(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of a configuration that does not say that the weights are quantised."""
    plain = copy.deepcopy(config)
    for part in (plain, plain.get_text_config(decoder=True)):
        part.__dict__.pop("quantization_config", None)
    return plain
