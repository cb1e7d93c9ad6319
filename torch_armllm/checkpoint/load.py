"""Loading a model and its tokenizer from whatever a user names."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from torch_armllm.checkpoint import bundled_model
from torch_armllm.checkpoint.formats import home_of, method_of, open_foreign, settings_of
from torch_armllm.checkpoint.formats.foreign_loader import load_foreign
from torch_armllm.checkpoint.upcycle import upcycle
from torch_armllm.hf.names import METHOD
from torch_armllm.quant.config import ArmInt4Config
from torch_armllm.quant.recipe import Recipe
from torch_armllm.quant.schemes.registry import scheme_named
from torch_armllm.system.host import free_memory

logger = logging.getLogger(__name__)

DENSE = "smollm2"
MOE = "smollm2-moe"
SOURCES = (
    f"{DENSE} (the embedded model), {MOE} (a Mixture-of-Experts made from it), a folder, a GGUF file, "
    "or a hub name"
)


def load(
    source: str,
    config: ArmInt4Config | None = None,
    dtype: torch.dtype | str = "auto",
    scheme: str | None = None,
) -> PreTrainedModel:
    """Loads a causal language model into packed modules, layer by layer, and patches it.

    A checkpoint that GPTQ, AWQ, llama.cpp, compressed-tensors or torchao quantized keeps its integers and
    scales; one that this package saved is taken as it lies; one of floats is quantized as it is read.

    Args:
        source: see `load_model`.
        config: how floats are quantized; of a checkpoint that is quantized already, ``head``, ``ignore``,
            ``kv_cache`` and ``fuse`` are regarded, of one of this package none.
        dtype: of what is not quantized, and of what the model computes; ``auto`` is the checkpoint's own.
        scheme: instead of that of ``config``.  What another tool quantized is decoded and quantized anew,
            layer by layer, by all that ``config`` says; the report has the error.

    Raises:
        FileNotFoundError: the folder holds no checkpoint.
        ValueError: the checkpoint is damaged, or quantized in a way that cannot be read; or it has a scheme
            of this package, and another one is asked for.
    """
    place = _place(source)
    saved = _config(place)
    foreign = open_foreign(place, saved, decoded=scheme is not None)
    config = copy.deepcopy(config) or ArmInt4Config()
    if scheme is not None:
        config.scheme = scheme_named(scheme).name
    if foreign is not None:
        return load_foreign(foreign, config, dtype)
    assert saved is not None
    own = settings_of(saved)
    if own is not None and scheme is not None:
        config.recipe.check_packed(ArmInt4Config(**own).recipe)
    options = {"quantization_config": config} if own is None else {}
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, **options)
    return model.eval()


def load_model(
    source: str,
    dtype: torch.dtype | str = torch.bfloat16,
    progress: bool = False,
    kv_cache: str | None = None,
    quantization: Recipe | None = None,
    decoded: bool = False,
) -> PreTrainedModel:
    """Loads a causal language model.

    Args:
        source: ``smollm2``, the embedded SmolLM2-135M-Instruct; ``smollm2-moe``, a Mixture-of-Experts of
            8 experts a layer made from it; a checkpoint's folder; a GGUF file; or a name on the
            model hub.
        dtype: of the weights; ``auto`` is the checkpoint's own.
        progress: shows a bar while the experts are made.
        kv_cache: see `patch`; of a checkpoint that was quantized before, instead of what it was saved with.
        quantization: the recipe by which weights are quantized as they are read, layer by layer, where memory
            does not suffice for all of them; None: they are loaded as they are.
        decoded: what another tool quantized is loaded as the floats that it stands for, and is not patched.

    Raises:
        FileNotFoundError: the embedded model is not installed, or the folder holds no checkpoint.
    """
    place = _place(source)
    config = _config(place)
    options: dict[str, Any]
    foreign = open_foreign(place, config, decoded)
    if foreign is not None and decoded:
        return load_foreign(foreign, None, dtype)
    if foreign is not None:
        options = {} if quantization is None else {"head": quantization.head, "ignore": quantization.ignore}
        return load_foreign(foreign, ArmInt4Config(**options, kv_cache=kv_cache), dtype)
    saved = getattr(config, "quantization_config", None)
    options = {"config": config, "dtype": dtype}
    if saved is not None:
        if kv_cache is not None and isinstance(saved, dict) and saved.get("quant_method") == METHOD:
            saved["kv_cache"] = kv_cache
    elif quantization is not None and (size := _weight_bytes(place)) > (free := free_memory()):
        logger.warning(
            "the weights have %.1f GB and %.1f GB are free: each layer is quantized as it is read, "
            "without regard to what its inputs carry",
            *(size / 1e9, free / 1e9),
        )
        options["quantization_config"] = ArmInt4Config(**quantization.to_dict(), kv_cache=kv_cache)
    model = AutoModelForCausalLM.from_pretrained(place, **options).eval()
    return upcycle(model, progress=progress) if source == MOE else model


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model; see `load_model`."""
    place = _place(source)
    home = home_of(place)
    where, options = (place, {}) if home is None else home.tokenizer_options(place)
    return AutoTokenizer.from_pretrained(where, **options)


def _config(place: str) -> PreTrainedConfig | None:
    """The configuration of a model; None where its file has none beside it."""
    return None if home_of(place) is not None else AutoConfig.from_pretrained(place)


def checkpoint_folder(source: str) -> Path:
    """The folder of a checkpoint; what is on the model hub is fetched.

    Raises:
        FileNotFoundError: the embedded model is not installed, or the folder holds no checkpoint.
        OSError: there is no such model on the hub, or no way to it.
    """
    place = Path(_place(source))
    if place.is_dir():
        return place
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(source, allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"])
    )


def is_foreign(source: str) -> bool:
    """Whether another tool quantized a checkpoint, or it is a file of one."""
    place = _place(source)
    settings = None if (config := _config(place)) is None else settings_of(config)
    return config is None or (settings is not None and method_of(settings) != METHOD)


def _place(source: str) -> str:
    if source in (DENSE, MOE):
        return str(bundled_model.smollm2_dir())
    path = Path(source).expanduser()
    if path.is_dir() and not (path / "config.json").exists():
        raise FileNotFoundError(f"{path} holds no config.json: it is not a transformers checkpoint")
    return str(path) if path.exists() else source


def _weight_bytes(place: str) -> int:
    """Bytes of a checkpoint's weights, by its index or its only file; 0 where it has neither."""
    index = cached_file(place, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    if index is not None:
        return int(json.loads(Path(index).read_text())["metadata"]["total_size"])
    file = cached_file(place, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
    return 0 if file is None else Path(file).stat().st_size
