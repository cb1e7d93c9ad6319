"""The configuration of a GGUF file's model: what transformers reads of it, and what it leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, MixtralConfig, PreTrainedConfig

_LEFT_OUT = {
    "attention.key_length": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Fields that transformers takes its own defaults for, and what they are called there."""


def read_config(path: str, architecture: str, fields: Any) -> PreTrainedConfig:
    """The configuration of the model in a file.

    Args:
        path: of the file.
        architecture: llama.cpp's name of it.
        fields: of the file's header, by name, as the ``gguf`` package reads them.

    Raises:
        ValueError: transformers does not read the architecture.
    """
    place = Path(path)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(place.parent, gguf_file=place.name)
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"{path}: architecture {architecture!r} cannot be read ({error})") from error
    for field, name in _LEFT_OUT.items():
        if (found := fields.get(f"{architecture}.{field}")) is not None and hasattr(config, name):
            setattr(config, name, int(found.contents()))
    experts = fields.get(f"{architecture}.expert_count")
    if config.model_type in ("llama", "mistral") and experts is not None and int(experts.contents()):
        return _mixtral(config, int(experts.contents()), fields[f"{architecture}.expert_used_count"])
    return config


def _mixtral(config: PreTrainedConfig, experts: int, active: Any) -> PreTrainedConfig:
    """llama.cpp calls Mixtral a Llama with experts, and transformers reads a Llama without."""
    own = {
        name: value for name, value in config.to_dict().items() if name not in ("model_type", "architectures")
    }
    return MixtralConfig(**own, num_local_experts=experts, num_experts_per_tok=int(active.contents()))
