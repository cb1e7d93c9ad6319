"""Fields of a config.json that would choose code, files or repositories, and dtypes that are none."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)

_DTYPES = ("bfloat16", "float16", "float32", "float64")
_ATTENTION = ("eager", "sdpa")
_EXPERTS = ("eager", "batched_mm", "grouped_mm")
_IMPLEMENTATIONS = {
    "attn_implementation": _ATTENTION,
    "_attn_implementation": _ATTENTION,
    "_attn_implementation_internal": _ATTENTION,
    "experts_implementation": _EXPERTS,
    "_experts_implementation": _EXPERTS,
    "_experts_implementation_internal": _EXPERTS,
}
"""Fields that choose code, and the values that mean code of transformers itself, without another package."""
_DROPPED = ("fusion_config", "distributed_config", "kernel_config", "use_kernels")
"""Fields that are arguments of ``from_pretrained``, which a config.json has no say in."""
_REFUSED = {
    "attribute_map": "it renames other fields",
    "sub_configs_defaults": "it replaces classes of transformers",
    "transformers_weights": "it names another file of weights, and model.safetensors or its index is read",
}
_TIMM = ("backbone", "architecture")
"""Fields that name a model of timm, which fetches ``hf-hub:…`` and reads ``local-dir:…``."""


def check_fields(source: str, fields: Mapping[str, Any]) -> None:
    """Checks fields of a config.json before transformers makes a configuration of them.

    Raises:
        ValueError: a dtype is none; or a field is a method of transformers' class, or names a repository or
            a file from which more would be read.
    """
    for name, part in _parts("", fields):
        for field, value in part.items():
            place = f"{name}{field} is {value!r} in the configuration of {source}"
            if field in ("dtype", "torch_dtype"):
                _check_dtype(place, value)
            elif field in _REFUSED and value:
                raise ValueError(f"{place}: {_REFUSED[field]}, which is not supported; remove it")
            elif field.startswith("__") or callable(getattr(PreTrainedConfig, field, None)):
                raise ValueError(f"{place}, and transformers has a method of this name: remove the field")
            elif field in _TIMM and isinstance(value, str) and ":" in value:
                raise ValueError(f"{place}, which timm would fetch: give the name of one of timm's models")


def without_choices(source: str, config: PreTrainedConfig) -> PreTrainedConfig:
    """Takes from a configuration what chooses code: attention, experts and fusions, in all of its parts.

    transformers would fetch a kernel from the repository that a value names, and run it.  The values of its
    own implementations stay.  Warns of every other one.
    """
    for name, part in _objects("", config):
        for field, allowed in _IMPLEMENTATIONS.items():
            value = part.get(field)
            if value is not None and value not in allowed:
                part[field] = None
                _say_dropped(source, f"{name}{field.removesuffix('_internal').lstrip('_')}", value)
        for field in _DROPPED:
            if part.pop(field, None):
                _say_dropped(source, f"{name}{field}", "set")
    return config


def _say_dropped(source: str, field: str, value: object) -> None:
    logger.warning(
        "%s in the configuration of %s is %r, which chooses code outside of the model: it is ignored",
        field,
        source,
        value,
    )


def _check_dtype(place: str, value: object) -> None:
    for one in value.values() if isinstance(value, Mapping) else (value,):
        if one is not None and (not isinstance(one, str) or one.removeprefix("torch.") not in _DTYPES):
            raise ValueError(f"{place}, and one of {', '.join(_DTYPES)} is expected")


def _parts(name: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the fields of a configuration and of the configurations in it, with the names before them."""
    yield name, fields
    for field, value in fields.items():
        if isinstance(value, Mapping) and field.endswith("config") and field != "quantization_config":
            yield from _parts(f"{name}{field}.", value)


def _objects(name: str, part: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the same of configurations that are made, whose fields can be replaced."""
    fields: dict[str, Any] = part if isinstance(part, dict) else vars(part)
    yield name, fields
    for field, value in list(fields.items()):
        if isinstance(value, PreTrainedConfig) or (isinstance(value, dict) and field.endswith("config")):
            yield from _objects(f"{name}{field}.", value)
