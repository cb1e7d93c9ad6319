"""Conversion of experts' weights to their class's layout, where transformers does not convert them.

transformers merges separate experts if the float checkpoints of their class store them so.  Other tools store
them separately for all classes, or merged, always with outputs as rows and gates before ups.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from torch_armllm.checkpoint.formats.integer_weight import IntegerWeight, LazyWeight
from torch_armllm.checkpoint.model_config import config_errors
from torch_armllm.hf.expert_detection import is_experts, read_layout
from torch_armllm.hf.expert_layout import ExpertLayout

_EXPERT = re.compile(r"(.+)\.(\d+)\.(gate_proj|up_proj|down_proj)\.(weight|bias)")


def fit_experts(config: PreTrainedConfig, weights: dict[str, Any], merged: Collection[str]) -> None:
    """Converts experts' weights to the names, row order and axis order of their class.

    Args:
        config: the model's configuration.
        weights: the checkpoint's weights by name; changed in place.
        merged: names of the weights that hold all experts of a layer.

    Raises:
        ValueError: an expert is missing, or the file merges gates and ups that alternate in the class.
    """
    separate: dict[str, dict[tuple[int, str, str], str]] = {}
    for name in weights:
        if match := _EXPERT.fullmatch(name):
            separate.setdefault(match[1], {})[int(match[2]), match[3], match[4]] = name
    if not separate and not merged:
        return
    with config_errors(config.name_or_path), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    layouts = _layouts(model)
    for name in merged:
        if (layout := layouts.get(_suffix(name.rpartition(".")[0]))) is not None:
            weights[name] = _transposed(name, weights[name], layout)
    converters = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightConverter)]
    for experts, names in separate.items():
        layout = layouts.get(_suffix(experts))
        weight_name = next(name for (_, _, part), name in names.items() if part == "weight")
        if layout is not None and not any(one.rename_source_key(weight_name)[1] for one in converters):
            own = {key: weights.pop(name) for key, name in names.items()}
            weights.update({f"{experts}.{name}": one for name, one in _join(experts, own, layout).items()})


def _layouts(model: PreTrainedModel) -> dict[str, ExpertLayout]:
    layouts = {
        _suffix(name): read_layout(module) for name, module in model.named_modules() if is_experts(module)
    }
    return {suffix: layout for suffix, layout in layouts.items() if isinstance(layout, ExpertLayout)}


def _suffix(name: str) -> str:
    """Returns a module's name from its layer's number on: the prefix differs from model to model."""
    return name.rpartition("layers.")[2]


def _transposed(name: str, weight: LazyWeight, layout: ExpertLayout) -> LazyWeight:
    """Transposes the weight of all experts, which has outputs as rows, if their class does."""
    if layout.interleaved and layout.gated and not name.endswith("down_proj"):
        raise ValueError(
            f"{name}: gates and ups alternate in the model, and the file does not say whether they do there; "
            "a checkpoint that stores each expert separately can be read"
        )
    if not layout.transposed:
        return weight
    return LazyWeight(lambda: torch.transpose(weight[...], 1, 2))  # type: ignore[arg-type]


def _join(
    experts: str, own: Mapping[tuple[int, str, str], Any], layout: ExpertLayout
) -> dict[str, LazyWeight]:
    """Returns the merged weights and biases, by their names in the module."""
    count = 1 + max(number for number, _, _ in own)
    halves = {"up_proj": ["up_proj"], "gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}
    merged = {}
    for name in layout.weights:
        for part, suffix in (("weight", ""), ("bias", "_bias")) if layout.biased else (("weight", ""),):
            parts = [[(number, half, part) for number in range(count)] for half in halves[name]]
            for number, half, _ in (key for keys in parts for key in keys if key not in own):
                raise ValueError(f"{experts}.{number}.{half} has no {part}: a file is missing or damaged")
            sources = [[own[key] for key in keys] for keys in parts]
            merged[f"{name}{suffix}"] = LazyWeight(partial(_merge, sources, layout))
    return merged


def _merge(halves: list[list[Any]], layout: ExpertLayout) -> IntegerWeight | Tensor:
    """Merges a weight or bias of all experts; ``halves`` are lists of gates and of ups, or of downs."""
    merged: Any = torch.cat([torch.stack([one[...] for one in half]) for half in halves], 1)
    return arranged(merged, layout, len(halves) > 1)


def arranged(merged: Any, layout: ExpertLayout | None, joined: bool) -> IntegerWeight | Tensor:
    """Arranges a weight or bias of all experts (E, rows, …), gates before ups, as a layout stores it.

    Args:
        merged: the weight or bias.
        layout: of the class; None: as it is.
        joined: it holds gates and ups.
    """
    if layout is not None and layout.interleaved and joined:
        order = torch.arange(merged.shape[1]).view(2, -1).t().flatten()
        merged = merged.rows(order) if isinstance(merged, IntegerWeight) else merged[:, order]
    turned = layout is not None and layout.transposed and len(merged.shape) > 2
    return torch.transpose(merged, 1, 2) if turned else merged
