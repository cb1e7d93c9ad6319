"""Experts brought into the form that their class stores them in, where transformers does not do it.

transformers joins experts that lie one by one where the float checkpoints of a class are written so.  Tools
write them one by one for all classes, or joined, always with outputs as rows and gates before ups.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from torch_armllm.checkpoint.formats.integer_weight import Integers, Lazy
from torch_armllm.hf.expert_detection import is_experts, read_layout
from torch_armllm.hf.expert_layout import ExpertLayout

_ONE = re.compile(r"(.+)\.(\d+)\.(gate_proj|up_proj|down_proj)\.(weight|bias)")


def fit_experts(config: PreTrainedConfig, weights: dict[str, Any], joined: Collection[str]) -> None:
    """Gives experts the names, the order of rows and the order of axes that their class has.

    Args:
        config: of the model.
        weights: of a checkpoint, by name; changed in place.
        joined: names of the weights that hold all experts of a layer.

    Raises:
        ValueError: an expert is missing, or gates and ups alternate in the class and are joined in the file.
    """
    apart: dict[str, dict[tuple[int, str, str], str]] = {}
    for name in weights:
        if match := _ONE.fullmatch(name):
            apart.setdefault(match[1], {})[int(match[2]), match[3], match[4]] = name
    if not apart and not joined:
        return
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    layouts = _layouts(model)
    for name in joined:
        if (layout := layouts.get(_place(name.rpartition(".")[0]))) is not None:
            weights[name] = _turned(name, weights[name], layout)
    converters = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightConverter)]
    for experts, names in apart.items():
        layout = layouts.get(_place(experts))
        known = next(name for (_, _, part), name in names.items() if part == "weight")
        if layout is not None and not any(one.rename_source_key(known)[1] for one in converters):
            own = {key: weights.pop(name) for key, name in names.items()}
            weights.update({f"{experts}.{name}": one for name, one in _join(experts, own, layout).items()})


def _layouts(model: PreTrainedModel) -> dict[str, ExpertLayout]:
    found = {
        _place(name): read_layout(module) for name, module in model.named_modules() if is_experts(module)
    }
    return {place: layout for place, layout in found.items() if isinstance(layout, ExpertLayout)}


def _place(name: str) -> str:
    """A module's name from its layer's number on: what lies before differs from model to model."""
    return name.rpartition("layers.")[2]


def _turned(name: str, weight: Lazy, layout: ExpertLayout) -> Lazy:
    """All experts' weights of outputs as rows, as their class stores them."""
    if layout.interleaved and layout.gated and not name.endswith("down_proj"):
        raise ValueError(
            f"{name}: gates and ups alternate in the model, and the file does not say whether they do there; "
            "a checkpoint that stores each expert apart can be read"
        )
    if not layout.transposed:
        return weight
    return Lazy(lambda: torch.transpose(weight[...], 1, 2))  # type: ignore[arg-type]


def _join(experts: str, own: Mapping[tuple[int, str, str], Any], layout: ExpertLayout) -> dict[str, Lazy]:
    """The class's weights and biases, by their names in the module, from those of each expert."""
    count = 1 + max(number for number, _, _ in own)
    halves = {"up_proj": ["up_proj"], "gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}
    made = {}
    for name in layout.weights:
        for part, suffix in (("weight", ""), ("bias", "_bias")) if layout.biased else (("weight", ""),):
            parts = [[(number, half, part) for number in range(count)] for half in halves[name]]
            for number, half, _ in (key for keys in parts for key in keys if key not in own):
                raise ValueError(f"{experts}.{number}.{half} has no {part}: a file is missing or damaged")
            alternate = layout.interleaved and len(parts) > 1
            turned = layout.transposed and part == "weight"
            sources = [[own[key] for key in keys] for keys in parts]
            made[f"{name}{suffix}"] = Lazy(lambda s=sources, a=alternate, t=turned: _one(s, a, t))  # type: ignore[misc]
    return made


def _one(halves: list[list[Any]], alternate: bool, turned: bool) -> Integers | Tensor:
    """One weight or bias (E, rows, …) of all experts, from its halves' one by one."""
    found: Any = torch.cat([torch.stack([one[...] for one in half]) for half in halves], 1)
    if alternate:
        order = torch.arange(found.shape[1]).view(2, -1).t().flatten()
        found = found.rows(order) if isinstance(found, Integers) else found[:, order]
    return torch.transpose(found, 1, 2) if turned else found
