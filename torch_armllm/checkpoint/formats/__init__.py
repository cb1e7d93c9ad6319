"""Checkpoints that other tools quantized: recognized here, read by a file each.

A reader gives a `Foreign`: what a float checkpoint of the model would hold, by the names that it would have
there, with `Integers` in the place of the weights that the tool quantized.  transformers' own conversions
bring names and shapes to what the model wants (experts stacked, halves joined), and `ForeignLoader` packs a
layer as soon as it has all of its weights.  A reader is listed in `READERS`; what it cannot read it refuses
by a ValueError that names the tensor or the setting and says why.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from torch_armllm.checkpoint.formats.base import Foreign, as_floats
from torch_armllm.checkpoint.formats.integer_weight import Integers, Lazy
from torch_armllm.hf.names import METHOD

__all__ = [
    "READERS",
    "SUFFIXES",
    "Foreign",
    "Integers",
    "Lazy",
    "home_of",
    "method_of",
    "open_foreign",
    "settings_of",
]

READERS = {
    "awq": "torch_armllm.checkpoint.formats.awq",
    "compressed-tensors": "torch_armllm.checkpoint.formats.compressed_tensors",
    "gptq": "torch_armllm.checkpoint.formats.gptq",
    "mxfp4": "torch_armllm.checkpoint.formats.mxfp4",
    "torchao": "torch_armllm.checkpoint.formats.torchao",
}
"""The module that reads a ``quant_method`` of config.json: ``read(place, config, settings) -> Foreign``."""
SUFFIXES = {".gguf": "torch_armllm.checkpoint.formats.gguf"}
"""The module that reads files of a suffix: ``read_file(path, decoded) -> Foreign``, and
``tokenizer_options(path)``, what transformers finds the tokenizer by."""


def home_of(place: str) -> Any:
    """The module that reads a file, by its suffix; None for folders and names."""
    homes = [home for suffix, home in SUFFIXES.items() if place.endswith(suffix)]
    return importlib.import_module(homes[0]) if homes else None


def open_foreign(place: str, config: PreTrainedConfig | None = None, decoded: bool = False) -> Foreign | None:
    """Opens a checkpoint that another tool quantized.

    Args:
        place: a folder, a name on the model hub, or a file.
        config: of the model, where it was read before.
        decoded: its weights are wanted as the floats that they stand for.

    Returns:
        What it holds, or None for a checkpoint of floats or of this package.

    Raises:
        ValueError: it is quantized in a way that cannot be read.
    """
    if (home := home_of(place)) is not None:
        read_file: Callable[[str, bool], Foreign] = home.read_file
        return read_file(place, decoded)
    config = AutoConfig.from_pretrained(place) if config is None else config
    settings = settings_of(config)
    if settings is None or method_of(settings) == METHOD:
        return None
    method = method_of(settings)
    if method not in READERS:
        raise ValueError(
            f"{place} is quantized by {method!r}, which cannot be read: what can be is "
            f"{', '.join(sorted(READERS))}; load a bfloat16 or float16 checkpoint of the model instead"
        )
    read: Callable[[str, PreTrainedConfig, dict[str, Any]], Foreign] = importlib.import_module(
        READERS[method]
    ).read
    if decoded and method == "mxfp4":
        settings["scheme"] = "int8g32"  # which holds it exactly
    try:
        foreign = read(place, config, settings)
    except ValueError as error:
        raise ValueError(f"{place} ({method}) cannot be read: {error}") from error
    return as_floats(foreign) if decoded else foreign


def settings_of(config: PreTrainedConfig) -> dict[str, Any] | None:
    """The ``quantization_config`` of a model or of the language model in it."""
    for part in (config, config.get_text_config(decoder=True)):
        found = getattr(part, "quantization_config", None)
        if found is not None:
            return dict(found) if isinstance(found, dict) else dict(found.to_dict())
    return None


def method_of(settings: dict[str, Any]) -> str:
    """The ``quant_method``; compressed-tensors wrote none at first."""
    return str(settings.get("quant_method") or ("compressed-tensors" if "config_groups" in settings else "?"))
