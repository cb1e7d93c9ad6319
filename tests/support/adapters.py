"""Random PEFT adapters for tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def random_adapter(
    model: PreTrainedModel, folder: Path, seed: int, scale: float = 0.2, **config: Any
) -> Path:
    """Saves an adapter of a float model, whose factors are both random; takes the adapter off again."""
    settings = {"r": 8, "lora_alpha": 16, "target_modules": ALL, **config}
    adapted = get_peft_model(model, LoraConfig(**settings))
    torch.manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=scale / parameter.shape[1] ** 0.5)
    adapted.save_pretrained(folder)
    adapted.unload()
    return folder
