"""Tiny random models of every causal language model family that the installed transformers has."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import Tensor, nn

from torch_armllm.model_survey.tiny_overrides import COUNTS, EXACT, OVERRIDES
from torch_armllm.model_survey.tiny_towers import PINPOINTS, is_tower, tower_values

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


def _default(kind: Any) -> Any:
    """Returns the default configuration of a class, or None: one without defaults needs its overrides."""
    with contextlib.suppress(Exception):
        return kind()
    return None


def _values(config: Any) -> dict[str, Any]:
    """Returns the values of a configuration by attribute."""
    values: dict[str, Any] = {}
    for name in sorted(getattr(config, "__dataclass_fields__", ())):
        with contextlib.suppress(Exception):  # some properties fail for the defaults
            values[name] = getattr(config, name)
    return values


def _parts(kind: Any, config: Any) -> dict[str, Any]:
    """Returns the parts of a configuration by attribute: their defaults, else their classes."""
    from transformers import CONFIG_MAPPING

    parts: dict[str, Any] = {}
    specs = getattr(kind, "sub_configs_defaults", {})
    for name, sub in getattr(kind, "sub_configs", {}).items():
        part = getattr(config, name, None)
        if hasattr(part, "to_diff_dict"):
            parts[name] = part
        elif isinstance(sub, type) and getattr(sub, "model_type", None):
            parts[name] = sub
        elif config is None and name in specs:  # validators refuse the defaults together
            parts[name] = CONFIG_MAPPING[specs[name].model_type]
    return parts


def _shrunk_part(name: str, part: Any, overrides: dict[str, Any]) -> dict[str, Any]:
    """Returns arguments for a tiny part of a configuration.

    Args:
        name: its attribute.
        part: its default or its class.
        overrides: values that are not to be drawn.
    """
    kind: Any = part if isinstance(part, type) else type(part)
    config = _default(part) if isinstance(part, type) else part
    values = _values(config)
    inner = _parts(kind, config)
    own = {} if config is None else config.to_diff_dict()  # what the whole asks of the part
    kept = {key: value for key, value in own.items() if key in values and key not in inner}
    own_overrides = {**OVERRIDES.get(kind.model_type, {}), **overrides}
    if not is_tower(name) and ("vocab_size" in values or "max_position_embeddings" in values):
        return {**kept, "model_type": kind.model_type, **_shrunk(kind, own_overrides, config)}
    arguments = {**kept, "model_type": kind.model_type, **tower_values(values)}
    for key, each in inner.items():
        arguments[key] = _shrunk_part(f"{name}.{key}", each, own_overrides.get(key, {}))
    return arguments | {key: value for key, value in own_overrides.items() if key not in inner}


def _rope_of_sections(values: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Returns rotary parameters that share out a head among time, height and width."""
    given = values.get("rope_parameters") or {}
    share = max(given.get("partial_rotary_factor", 1.0), 0.5)
    pairs = int(head_dim * share) // 2
    side = 3 * pairs // 8
    sections = [pairs - 2 * side, side, side]
    return {**given, "rope_type": "default", "partial_rotary_factor": share, "mrope_section": sections}


def _shrunk(kind: Any, overrides: dict[str, Any], config: Any = None) -> dict[str, Any]:
    """Returns arguments for a tiny configuration of a class.

    Args:
        kind: the class.
        overrides: values that are not to be drawn.
        config: its default.
    """
    config = _default(kind) if config is None else config
    subs = _parts(kind, config)
    arguments: dict[str, Any] = {}
    for name, part in subs.items():
        arguments[name] = _shrunk_part(name, part, overrides.get(name, {}))
    values = _values(config)
    layers = overrides.get("num_hidden_layers", _layers(values))
    for name, value in values.items():
        if name in subs or isinstance(value, bool):
            continue
        if name == "image_grid_pinpoints" and value:
            arguments[name] = PINPOINTS
        if name == "projection_hidden_size":  # as wide as the tower that it is of
            widths = {sub: getattr(part, "hidden_size", None) for sub, part in subs.items() if is_tower(sub)}
            tower = next((sub for sub, width in widths.items() if width == value), None)
            arguments.update({} if tower is None else {name: arguments[tower]["hidden_size"]})
        if name in ("head_dim", "vocab_size") and value is None:
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
    if "mrope_section" in getattr(kind, "ignore_keys_at_rope_validation", ()):
        heads = arguments.get("qk_rope_head_dim") or arguments.get("head_dim") or EXACT["head_dim"]
        arguments["rope_parameters"] = _rope_of_sections(values, heads)
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


def _made(kind: Any, config: Any) -> Any:
    """Returns a model of a configuration, also where the auto class itself would fail.

    It fails where two model types share the configuration, where the model takes a part of it that is no text
    configuration, and where there are two models and no word of which.
    """
    import transformers

    names = getattr(kind, "_model_mapping", None)
    name = None if names is None else names._model_mapping.get(config.model_type)
    own = getattr(transformers, name if isinstance(name, str) else next(iter(name or ()), ""), None)
    if own is None or own.config_class == getattr(config, "sub_configs", {}).get("text_config"):
        return kind.from_config(config)
    parts = [config, *(getattr(config, part, None) for part in getattr(config, "sub_configs", ()))]
    wanted = [part for part in parts if own.config_class is None or isinstance(part, own.config_class)]
    return own._from_config(wanted[0] if wanted else config)


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
        outline = _made(kind, copy.deepcopy(config))
    count = sum(parameter.numel() for parameter in outline.parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"its smallest known configuration has {count / 1e6:.0f} million parameters")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = _made(kind, config)
        _randomize(model)
    return model.to(dtype).eval()


def tiny_ids(batch: int = 1, length: int = 12, seed: int = 1) -> Tensor:
    """Returns random token ids ``(batch, length)`` without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, VOCABULARY - 7, (batch, length), generator=generator)
