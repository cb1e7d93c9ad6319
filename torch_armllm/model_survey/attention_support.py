"""Classification of model families: only those with transformers' attention interface can be captured."""

from __future__ import annotations

import contextlib
from typing import Any

from torch_armllm.model_survey.tiny_models import tiny_config

ATTENTION = "attention interface"
STATE = "recurrent state"
SEVERAL = "several modalities"
OWN = "attention of its own"
_OTHER_LAYERS = ("conv", "linear_attention", "mamba", "recurrent")


def _model_class(family: str) -> Any:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    classes = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[family]]
    return classes[0] if isinstance(classes, tuple) else classes


def reach_of(family: str) -> str:
    """Returns the kind of a family, as transformers declares it.

    Args:
        family: a ``model_type``.

    Returns:
        `ATTENTION` if all layers attend through transformers' attention interface; else the first match of
        `STATE` (layers carry a state from token to token), `SEVERAL` (a wrapper of a language model and other
        models), and `OWN` (transformers does not mark it as ready for other attention).
    """
    from transformers import CONFIG_MAPPING

    model, config = _model_class(family), CONFIG_MAPPING[family]
    kinds: list[str] = []
    with contextlib.suppress(Exception):  # no list of layers without a configuration
        kinds = getattr(tiny_config(family), "layer_types", None) or []
    if getattr(model, "_is_stateful", False) or any(kind in _OTHER_LAYERS for kind in kinds):
        return STATE
    parts = getattr(config, "sub_configs", {})
    if any(part in name for name in parts for part in ("text", "vision", "audio")):
        return SEVERAL
    return ATTENTION if model._supports_attention_backend else OWN
