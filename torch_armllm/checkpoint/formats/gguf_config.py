"""The configuration of a GGUF file's model, with the fields that transformers does not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, MixtralConfig, PreTrainedConfig

from torch_armllm.checkpoint.model_config import check_sizes, config_errors

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
        with config_errors(path):
            config: PreTrainedConfig = AutoConfig.from_pretrained(
                file.parent, gguf_file=file.name, trust_remote_code=False
            )
            check_sizes(path, config)
    except ValueError as error:
        raise ValueError(f"{path}: architecture {architecture!r} cannot be read ({error})") from error
    for field, name in _UNREAD.items():
        if (entry := fields.get(f"{architecture}.{field}")) is not None and hasattr(config, name):
            setattr(config, name, _integer(path, field, entry))
    experts = fields.get(f"{architecture}.expert_count")
    count = 0 if experts is None else _integer(path, "expert_count", experts)
    if config.model_type in ("llama", "mistral") and count:
        active = fields.get(f"{architecture}.expert_used_count")
        if active is None:
            raise ValueError(f"{path} has {count} experts and no expert_used_count: it is damaged")
        return _mixtral(config, count, _integer(path, "expert_used_count", active))
    return config


def _integer(path: str, name: str, field: Any) -> int:
    value = field.contents()
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} in the header of {path} is {value!r}, and an integer is expected")
    return value


def _mixtral(config: PreTrainedConfig, experts: int, active: int) -> PreTrainedConfig:
    """Returns Mixtral's configuration: llama.cpp's header is a Llama with experts, read as one without."""
    values = {
        name: value for name, value in config.to_dict().items() if name not in ("model_type", "architectures")
    }
    return MixtralConfig(**values, num_local_experts=experts, num_experts_per_tok=active)
