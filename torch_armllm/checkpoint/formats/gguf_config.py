"""The configuration of a GGUF file's model, with the fields that transformers does not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, MixtralConfig, PreTrainedConfig

_UNREAD = {
    "attention.key_length": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Header fields for which transformers uses its own defaults, and their names in its configurations."""


def read_config(path: str, architecture: str, fields: Any) -> PreTrainedConfig:
    """Reads the configuration of the model in a file.

    Args:
        path: the file.
        architecture: llama.cpp's name of the architecture.
        fields: the file's header by name, as the ``gguf`` package reads it.

    Raises:
        ValueError: transformers does not support the architecture.
    """
    file = Path(path)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"{path}: architecture {architecture!r} cannot be read ({error})") from error
    for field, name in _UNREAD.items():
        if (found := fields.get(f"{architecture}.{field}")) is not None and hasattr(config, name):
            setattr(config, name, int(found.contents()))
    experts = fields.get(f"{architecture}.expert_count")
    if config.model_type in ("llama", "mistral") and experts is not None and int(experts.contents()):
        return _mixtral(config, int(experts.contents()), fields[f"{architecture}.expert_used_count"])
    return config


def _mixtral(config: PreTrainedConfig, experts: int, active: Any) -> PreTrainedConfig:
    """Returns Mixtral's configuration: llama.cpp's header is a Llama with experts, read as one without."""
    values = {
        name: value for name, value in config.to_dict().items() if name not in ("model_type", "architectures")
    }
    return MixtralConfig(**values, num_local_experts=experts, num_experts_per_tok=int(active.contents()))
