"""Registry of the readers, and the call that opens a third-party checkpoint."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.utils.quantization_config import QuantizationConfigMixin

from torch_armllm.checkpoint.formats.third_party_checkpoint import ThirdPartyCheckpoint, as_floats
from torch_armllm.checkpoint.model_config import read_config
from torch_armllm.checkpoint.own_head import untie_own_head
from torch_armllm.hf.names import METHOD

FOLDER_READERS = {
    "awq": "torch_armllm.checkpoint.formats.awq",
    "compressed-tensors": "torch_armllm.checkpoint.formats.compressed_tensors",
    "gptq": "torch_armllm.checkpoint.formats.gptq",
    "mxfp4": "torch_armllm.checkpoint.formats.mxfp4",
    "torchao": "torch_armllm.checkpoint.formats.torchao",
}
"""Reader modules by ``quant_method``: ``read(source, config, settings)`` returns a ThirdPartyCheckpoint."""
FILE_READERS = {".gguf": "torch_armllm.checkpoint.formats.gguf"}
"""Reader modules by file suffix: ``read_file(path, dequantize)`` returns a ThirdPartyCheckpoint, and
``tokenizer_options(path)`` the arguments with which transformers finds the tokenizer."""


def file_reader(source: str) -> Any:
    """Returns the reader module of a file, by its suffix; None for folders and hub names."""
    names = [name for suffix, name in FILE_READERS.items() if source.endswith(suffix)]
    return importlib.import_module(names[0]) if names else None


def open_third_party(
    source: str, config: PreTrainedConfig | None = None, dequantize: bool = False
) -> ThirdPartyCheckpoint | None:
    """Opens a checkpoint that another tool quantized.

    Args:
        source: a folder, a name on the model hub, or a file.
        config: the model's configuration; None: it is read from ``source``.
        dequantize: returns its weights as floats.

    Returns:
        The checkpoint; None for a checkpoint of floats or of this package.

    Raises:
        ValueError: the checkpoint is quantized in a way that no reader supports.
    """
    if (reader := file_reader(source)) is not None:
        read_file: Callable[[str, bool], ThirdPartyCheckpoint] = reader.read_file
        return read_file(source, dequantize)
    config = read_config(source) if config is None else config
    settings = quantization_settings(config)
    if settings is None or quant_method_of(settings) == METHOD:
        return None
    method = quant_method_of(settings)
    if method not in FOLDER_READERS:
        raise ValueError(
            f"{source} is quantized by {method!r}, which has no reader: there are readers for "
            f"{', '.join(sorted(FOLDER_READERS))}; load a bfloat16 or float16 checkpoint of the model instead"
        )
    read: Callable[[str, PreTrainedConfig, dict[str, Any]], ThirdPartyCheckpoint] = importlib.import_module(
        FOLDER_READERS[method]
    ).read
    if dequantize and method == "mxfp4":
        settings["scheme"] = "int8g32"  # holds MXFP4 exactly
    untie_own_head(AutoModelForCausalLM, source, config)
    try:
        checkpoint = read(source, config, settings)
    except ValueError as error:
        raise ValueError(f"{source} ({method}) cannot be read: {error}") from error
    return as_floats(checkpoint) if dequantize else checkpoint


def quantization_settings(config: PreTrainedConfig) -> dict[str, Any] | None:
    """Returns the ``quantization_config`` of a model, or of the language model in it."""
    for part in (config, config.get_text_config(decoder=True)):
        settings = getattr(part, "quantization_config", None)
        if isinstance(settings, QuantizationConfigMixin):
            return dict(settings.to_dict())
        if settings is not None and not isinstance(settings, dict):
            raise ValueError(f"quantization_config is {settings!r}, and an object is expected in config.json")
        if settings is not None:
            return dict(settings)
    return None


def quant_method_of(settings: dict[str, Any]) -> str:
    """Returns the ``quant_method``; early versions of compressed-tensors wrote none."""
    return str(settings.get("quant_method") or ("compressed-tensors" if "config_groups" in settings else "?"))
