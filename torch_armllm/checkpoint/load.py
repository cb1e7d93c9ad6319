"""Loading of models and tokenizers: folders, GGUF files, hub names, the bundled model."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from torch_armllm.checkpoint import bundled_model
from torch_armllm.checkpoint.formats.registry import (
    file_reader,
    open_third_party,
    quant_method_of,
    quantization_settings,
)
from torch_armllm.checkpoint.formats.third_party_loader import load_third_party
from torch_armllm.checkpoint.hub_snapshot import hub_snapshot
from torch_armllm.checkpoint.loaded_values import check_small_tensors
from torch_armllm.checkpoint.model_config import check_one_stack, config_errors, read_config, with_overrides
from torch_armllm.checkpoint.named_files import check_tokenizer_names
from torch_armllm.checkpoint.pretrained import load_pretrained
from torch_armllm.checkpoint.saved_metadata import verify_folder
from torch_armllm.checkpoint.source_name import DENSE, MOE, check_source, not_found
from torch_armllm.checkpoint.upcycle import upcycle
from torch_armllm.checkpoint.weight_files import SAFETENSORS, find_file, read_index
from torch_armllm.hf.names import METHOD
from torch_armllm.quant.config import ArmInt4Config
from torch_armllm.quant.recipe import Recipe
from torch_armllm.system.default_dtype import Float32ByDefault
from torch_armllm.system.dtypes import float_dtype
from torch_armllm.system.extras import naming_extra
from torch_armllm.system.host import free_memory
from torch_armllm.system.panics import PANICS_AS_ERRORS

logger = logging.getLogger(__name__)


@Float32ByDefault()
def load(
    source: str,
    quantization: str | Recipe = "int4",
    *,
    dtype: torch.dtype | str = "auto",
    kv_cache_dtype: str | None = None,
    fuse: bool = True,
    requantize: bool = False,
    verify: bool = False,
) -> PreTrainedModel:
    """Loads a causal language model into packed modules, layer by layer, and patches it.

    A checkpoint that GPTQ, AWQ, llama.cpp, compressed-tensors or torchao quantized keeps its integers and
    scales.  A checkpoint that this package saved is loaded unchanged.  A float checkpoint is quantized as it
    is read.

    Args:
        source: see `load_model`.
        quantization: the name of a scheme, or a `Recipe`, by which floats are quantized.  For a third-party
            checkpoint only its ``head`` and ``ignore`` apply; for a checkpoint of this package, nothing does.
        dtype: of the float weights and the activations; ``auto`` is the checkpoint's own.
        kv_cache_dtype: see `torch_armllm.patch`; for a checkpoint of this package, replaces the saved one.
        fuse: patch the model; False leaves that to a later call of ``patch``.
        requantize: dequantize a third-party checkpoint and quantize it again, layer by layer, by all of
            ``quantization``; the report has the errors.
        verify: read every tensor first, and compare its checksum with the one that was saved with it; for a
            checkpoint of this package.

    Raises:
        FileNotFoundError: the folder holds no checkpoint.
        ValueError: the checkpoint is damaged, or quantized in a way that no reader supports; the model has an
            encoder and a decoder; or it is to be requantized, and this package quantized it by another
            recipe.
    """
    recipe = Recipe.of(quantization)
    dtype = float_dtype(dtype)
    path = resolve(source)
    saved = _config(path)
    check_one_stack(path, saved)
    if verify:
        verify_source(path)
    third_party = open_third_party(path, saved, dequantize=requantize)
    config = ArmInt4Config(recipe, kv_cache_dtype=kv_cache_dtype, fuse=fuse)
    if third_party is not None:
        if recipe.bits is not None:
            raise ValueError(f"bits={recipe.bits} needs float weights, and {source} is quantized already")
        return load_third_party(third_party, config, dtype)
    assert saved is not None
    settings = quantization_settings(saved)
    if settings is not None and requantize:
        recipe.check_packed(ArmInt4Config(**settings).recipe)
    options: dict[str, Any] = {}
    if settings is None:
        options["quantization_config"] = config
    else:
        changes = {"fuse": fuse} | ({} if kv_cache_dtype is None else {"kv_cache": kv_cache_dtype})
        with config_errors(path):
            _with_settings(saved, changes)
    return load_pretrained(auto_class(saved), path, saved, dtype=dtype, **options).eval()


@Float32ByDefault()
def load_model(
    source: str,
    dtype: torch.dtype | str = torch.bfloat16,
    progress: bool = False,
    kv_cache_dtype: str | None = None,
    quantization: Recipe | None = None,
    dequantize: bool = False,
    hf_overrides: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Loads a causal language model.

    Args:
        source: ``smollm2``, the bundled SmolLM2-135M-Instruct; ``smollm2-moe``, a Mixture-of-Experts with
            8 experts per layer made from it; a checkpoint's folder; a GGUF file; or a name on the model hub.
        dtype: of the weights; ``auto`` is the checkpoint's own.
        progress: shows a bar while the experts are made.
        kv_cache_dtype: see `torch_armllm.patch`; for a quantized checkpoint, replaces the saved setting.
        quantization: the recipe by which weights are quantized as they are read, layer by layer, if the free
            memory is less than the float weights; None: weights are loaded unchanged.
        dequantize: loads a third-party checkpoint as floats, and does not patch the model.
        hf_overrides: see `torch_armllm.checkpoint.model_config.with_overrides`.

    Raises:
        FileNotFoundError: the bundled model is not installed, or the folder holds no checkpoint.
        ValueError: the model has an encoder and a decoder, or an override does not fit it.
    """
    dtype = float_dtype(dtype)
    path = resolve(source)
    config = _config(path)
    if hf_overrides:
        config = with_overrides(path, config, hf_overrides)
    check_one_stack(path, config)
    third_party = open_third_party(path, config, dequantize)
    if third_party is not None and dequantize:
        return load_third_party(third_party, None, dtype)
    if third_party is not None:
        requested = quantization or Recipe()
        recipe = Recipe(
            head=requested.head,
            ignore=requested.ignore,
            int16_activations=requested.int16_activations,
        )
        return load_third_party(third_party, ArmInt4Config(recipe, kv_cache_dtype=kv_cache_dtype), dtype)
    assert config is not None
    options: dict[str, Any] = {}
    if getattr(config, "quantization_config", None) is not None:
        if kv_cache_dtype is not None:
            with config_errors(path):
                _with_settings(config, {"kv_cache": kv_cache_dtype})
    elif quantization is not None and (size := _weight_bytes(path)) > (free := free_memory()):
        if quantization.bits is not None:
            raise ValueError(
                f"bits={quantization.bits} needs the float weights in memory, {size / 1e9:.1f} GB, and "
                f"{free / 1e9:.1f} GB are free: use torch-armllm quantize --bits, from folder to folder"
            )
        logger.warning(
            "the weights have %.1f GB and %.1f GB are free: each layer is quantized as it is read, "
            "without input importance",
            *(size / 1e9, free / 1e9),
        )
        layerwise = replace(quantization, importance=None)
        options["quantization_config"] = ArmInt4Config(layerwise, kv_cache_dtype=kv_cache_dtype)
    model: Any = load_pretrained(auto_class(config), path, config, dtype=dtype, **options).eval()
    if not hasattr(model, "hf_quantizer"):
        check_small_tensors(model, lambda name: path)
    return upcycle(model, progress=progress) if source == MOE else model


_TEXT_APART = ("llama4", "qwen3_5", "qwen3_5_moe")
"""Model types that take pictures, and of which transformers also makes a model of texts alone."""
_OTHERS = ("ImageTextToText", "MultimodalLM", "SpeechSeq2Seq")
"""Kinds of models that generate text and take pictures or sound too."""


def auto_class(config: Any) -> Any:
    """Returns the class that makes a language model of a configuration: pictures and sound have their own.

    If transformers has no auto class for a configuration, the class that config.json names is taken.
    """
    kind = type(config)
    if kind in AutoModelForCausalLM._model_mapping and config.model_type not in _TEXT_APART:
        return AutoModelForCausalLM
    autos = (getattr(transformers, f"AutoModelFor{name}", None) for name in _OTHERS)
    found = (auto for auto in autos if auto is not None and kind in auto._model_mapping)
    named: Any = getattr(transformers, str((config.architectures or [""])[0]), None)
    is_model = inspect.isclass(named) and issubclass(named, PreTrainedModel)
    is_its_own = is_model and named.config_class is kind and named.can_generate()
    return next(found, named if is_its_own else AutoModelForCausalLM)


def verify_source(source: str) -> int:
    """Compares every tensor of a checkpoint with the checksum that was saved with it; see `load_model`.

    Returns:
        The number of tensors.

    Raises:
        ValueError: a tensor has changed, or the checkpoint has no checksums.
    """
    path = resolve(source)
    if file_reader(path) is not None:
        raise ValueError(f"{path} has no checksums: only folders that this package wrote can be verified")
    return verify_folder(path)


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model; see `load_model`."""
    path = resolve(source)
    reader = file_reader(path)
    name, options = (path, {}) if reader is None else reader.tokenizer_options(path)
    with naming_extra("timm", f"the vision tower of {source}"), not_found(path), PANICS_AS_ERRORS:
        if reader is None:
            check_tokenizer_names(path)
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)


def load_processor(source: str) -> Any:
    """Loads the processor of a model that takes pictures or sound.

    Raises:
        ValueError: its files name another repository, or do not fit.
        OSError: there is none.
        ImportError: it needs a package that is not installed.
    """
    for name in ("processor_config.json", "audio_tokenizer_config.json"):
        file = find_file(source, name)
        fields = {} if file is None else json.loads(file.read_text(encoding="utf-8"))
        part = fields.get("audio_tokenizer", fields) if isinstance(fields, dict) else {}
        other = part.get("audio_tokenizer_name_or_path") if isinstance(part, dict) else None
        if other is not None:
            raise ValueError(
                f"{name} names the audio tokenizer {other!r}, which would be loaded from its own repository: "
                "no model that is served needs one; remove the entry"
            )
    processor = AutoProcessor.from_pretrained(source, trust_remote_code=False)
    settings = getattr(getattr(processor, "tokenizer", None), "init_kwargs", {})
    if settings.get("max_length", 0) is None:  # processors would tell it the extractors of sound, too
        del settings["max_length"]
    return processor


def _with_settings(config: PreTrainedConfig, changes: dict[str, Any]) -> None:
    """Replaces settings in the ``quantization_config`` that this package saved; of others, none."""
    settings = getattr(config, "quantization_config", None)
    if isinstance(settings, dict) and settings.get("quant_method") == METHOD:
        ArmInt4Config.from_dict(settings)  # what is wrong in them is reported, not replaced
        settings.update(changes)


def _config(path: str) -> PreTrainedConfig | None:
    """Reads the configuration of a model; None for a single file, which has no config.json."""
    return None if file_reader(path) is not None else read_config(path)


def checkpoint_folder(source: str) -> Path:
    """Returns the folder of a checkpoint, downloaded if it is on the model hub.

    Raises:
        FileNotFoundError: the bundled model is not installed, or the folder holds no checkpoint.
        OSError: the hub has no such model, or cannot be reached.
    """
    folder = Path(resolve(source))
    if folder.is_dir():
        return folder
    return hub_snapshot(source)


def is_third_party(source: str) -> bool:
    """True if another tool quantized the checkpoint or wrote it as a single file."""
    path = resolve(source)
    settings = None if (config := _config(path)) is None else quantization_settings(config)
    return config is None or (settings is not None and quant_method_of(settings) != METHOD)


def resolve(source: str) -> str:
    """Returns the folder of a model's name or path; a hub name as it is.

    Raises:
        FileNotFoundError: the path does not exist, the folder holds no checkpoint, or the bundled model is
            not installed.
    """
    if source in (DENSE, MOE):
        return str(bundled_model.smollm2_dir())
    check_source(source)
    path = Path(source).expanduser()
    if path.is_dir() and not (path / "config.json").exists():
        raise FileNotFoundError(f"{path} holds no config.json: it is not a transformers checkpoint")
    return str(path) if path.exists() else source


def _weight_bytes(path: str) -> int:
    """Returns the bytes of a checkpoint's weights, by its only file or its index; 0 if it has neither."""
    [(index_name, single)] = SAFETENSORS
    if (file := find_file(path, single)) is not None:
        return file.stat().st_size
    index = find_file(path, index_name)
    size = 0 if index is None else (read_index(index).get("metadata") or {}).get("total_size")
    return size if isinstance(size, int) else 0
