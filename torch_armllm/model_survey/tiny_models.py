"""Tiny random models of every causal language model family that the installed transformers has."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import Tensor, nn

from torch_armllm.model_survey.tiny_overrides import COUNTS, EXACT, OVERRIDES

VOCABULARY = 97
MOST_PARAMETERS = 10**8
MOST_KINDS = 4
"""A list with more distinct entries does not hold kinds of layers."""


def families() -> list[str]:
    """Returns the model types of transformers' causal language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names

    return list(names)


def _layers(values: dict[str, Any]) -> int:
    """Returns the number of layers: one per kind, at least two."""
    kinds = [len(set(value)) for value in values.values() if _is_by_layer(value, values)]
    return max([2, *kinds])


def _is_by_layer(value: Any, values: dict[str, Any]) -> bool:
    """True if a value is a list with an entry per layer."""
    if not isinstance(value, (list, tuple)) or not value or isinstance(value[0], (list, tuple, dict)):
        return False
    return (
        len(value) in {values.get(name) for name in COUNTS}
        and len(set(value)) <= MOST_KINDS
        and len(value) > 2
    )


def _first_kinds(values: Any, count: int) -> list[Any]:
    kinds = list(dict.fromkeys(values))
    return [kinds[i % len(kinds)] for i in range(count)]


def _defaults(kind: Any, fields: set[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    try:
        config = kind()
    except Exception:  # noqa: BLE001 - a configuration without defaults needs its overrides
        return values
    for name in sorted(fields):
        with contextlib.suppress(Exception):  # some properties fail for the defaults
            values[name] = getattr(config, name)
    return values


def _shrunk(kind: Any, overrides: dict[str, Any]) -> dict[str, Any]:
    """Returns arguments for a tiny configuration of a class."""
    fields = set(getattr(kind, "__dataclass_fields__", ()))
    subs = {name: sub for name, sub in getattr(kind, "sub_configs", {}).items() if isinstance(sub, type)}
    arguments: dict[str, Any] = {}
    for name, sub in subs.items():
        if hasattr(sub, "model_type") and sub.model_type:
            arguments[name] = {"model_type": sub.model_type, **_shrunk(sub, overrides.get(name, {}))}
    values = _defaults(kind, fields)
    layers = overrides.get("num_hidden_layers", _layers(values))
    for name, value in values.items():
        if name in subs or isinstance(value, bool):
            continue
        if name == "head_dim" and value is None:
            arguments[name] = EXACT[name]
        elif name in COUNTS and isinstance(value, int):
            arguments[name] = layers
        elif name in EXACT and isinstance(value, int):
            arguments[name] = min(EXACT[name], value) if value > 0 else value
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            arguments[name] = min(value, VOCABULARY - 1) if value > 2 else value
        elif _is_by_layer(value, values):
            kinds = _first_kinds(value, layers)
            arguments[name] = [min(EXACT[name], kind) for kind in kinds] if name in EXACT else kinds
    if "kv_lora_rank" in arguments and "num_key_value_heads" in arguments:
        arguments["num_key_value_heads"] = arguments["num_attention_heads"]  # latents expand to every head
    return {**arguments, **{k: v for k, v in overrides.items() if k not in subs or k not in arguments}}


def tiny_config(family: str, **overrides: Any) -> Any:
    """Returns a configuration of a family (a ``model_type``) whose model is built in milliseconds."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[family]
    return kind(**_shrunk(kind, {**OVERRIDES.get(family, {}), **overrides}))


def _randomize(model: nn.Module) -> None:
    """Draws much larger weights than the initial ones: errors of position or expert must exceed rounding."""
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            parameter.normal_(0.0, 0.08)
        elif "bias" in name:
            parameter.normal_(0.0, 0.02)
        else:
            parameter.add_(torch.randn_like(parameter) * 0.05)
    for name, buffer in model.named_buffers():  # some weights are buffers
        if buffer.is_floating_point() and name.endswith("bias") and buffer.dim() <= 2:  # wider ones are masks
            buffer.normal_(0.0, 0.1)
        elif buffer.is_floating_point() and name.endswith("norm.weight"):
            buffer.add_(torch.randn_like(buffer) * 0.05)


def tiny_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> Any:
    """Returns a tiny random model of a family, in evaluation mode.

    Args:
        family: a ``model_type`` of `families`.
        dtype: dtype of the parameters.
        seed: seed of the weights, independent of the global random state.
        overrides: configuration values.

    Raises:
        ValueError: the model would be large, since the configuration has unknown size names.
    """
    from transformers import AutoModelForCausalLM

    return build_tiny(AutoModelForCausalLM, tiny_config(family, **overrides), dtype, seed)


def build_tiny(kind: Any, config: Any, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Returns a random model of a configuration, in evaluation mode.

    Args:
        kind: a class of transformers with ``from_config``.
        config: a configuration.
        dtype: dtype of the parameters.
        seed: see `tiny_model`.

    Raises:
        ValueError: the model would be large.
    """
    with torch.device("meta"):
        outline = kind.from_config(copy.deepcopy(config))
    count = sum(parameter.numel() for parameter in outline.parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"its smallest known configuration has {count / 1e6:.0f} million parameters")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = kind.from_config(config)
        _randomize(model)
    return model.to(dtype).eval()


def tiny_ids(batch: int = 1, length: int = 12, seed: int = 1) -> Tensor:
    """Returns random token ids ``(batch, length)`` without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, VOCABULARY - 7, (batch, length), generator=generator)
