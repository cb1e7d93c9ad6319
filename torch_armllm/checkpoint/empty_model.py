"""A model of a configuration on the meta device: names, shapes and ties without values."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedConfig

from torch_armllm.checkpoint.model_config import config_errors


def empty_model(kind: Any, config: PreTrainedConfig, source: str, dtype: torch.dtype | None = None) -> Any:
    """Returns a model on the meta device.

    Args:
        kind: a class of models, or an auto class.
        config: of the model; not changed.
        source: the folder or hub name that it was read from, for messages.
        dtype: of the weights; None: the configuration's, or torch's default.

    Raises:
        ValueError: transformers cannot use the configuration.
    """
    make = getattr(kind, "from_config", None) or kind._from_config
    options = {} if dtype is None else {"dtype": dtype}
    with config_errors(source), torch.device("meta"):
        return make(copy.deepcopy(config), **options).eval()
