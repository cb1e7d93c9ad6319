"""The one call of transformers' ``from_pretrained`` for folders and hub names, and checks around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from torch_armllm.checkpoint.incoming import Incoming, check_incoming
from torch_armllm.checkpoint.left_out import LeftOut
from torch_armllm.checkpoint.model_config import config_errors
from torch_armllm.checkpoint.model_names import ModelNames
from torch_armllm.checkpoint.own_head import untie_own_head
from torch_armllm.checkpoint.tensor_headers import read_headers, read_tensor
from torch_armllm.checkpoint.weight_files import find_file, weight_files

ADAPTER = "adapter_config.json"
_PIECES = "shard-*-model-*-of-*.safetensors"
"""Files of several processes' parts of tensors, which transformers prefers to all others."""


def load_pretrained(
    kind: Any,
    source: str,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype | str,
    optional: Sequence[str] = (),
    **options: Any,
) -> PreTrainedModel:
    """Loads a model of a folder or hub name by transformers, and refuses what it would only log.

    Args:
        kind: a class of models, or an auto class.
        source: a folder or hub name.
        config: of the model, as `read_config` returns it.
        dtype: of the weights.
        optional: patterns of tensors that the caller does not use, and that may be missing.
        options: further arguments of ``from_pretrained``.

    Raises:
        ValueError: tensors are missing or have no place in the model, weights lack the settings of their
            quantization, a file is damaged, or config.json does not fit.
        OSError: a file cannot be read, or the hub does not have it.
    """
    refuse_adapter(source)
    if Path(source).is_dir() and any(Path(source).glob(_PIECES)):
        raise ValueError(
            f"{source} holds parts of tensors ({_PIECES}), as several processes save them: load it with "
            "transformers there, and save it with save_pretrained"
        )
    if getattr(config, "quantization_config", None) is None:
        untie_own_head(kind, source, config)
    with config_errors(source):
        model, info = kind.from_pretrained(
            source, config=config, dtype=dtype, trust_remote_code=False, output_loading_info=True, **options
        )
    if not hasattr(model, "hf_quantizer"):  # the quantizer has checked what it read
        check_loaded(model, info, source, config, optional)
    return model


def refuse_adapter(source: str) -> None:
    """Raises ValueError if a checkpoint has an adapter in it, which transformers would load on top of it.

    Without PEFT it would not, and the same folder would be another model.
    """
    if find_file(source, ADAPTER) is not None:
        raise ValueError(
            f"{source} holds {ADAPTER} beside a model, so that it means two models: merge the adapter with "
            "PEFT's merge_and_unload and save the result, give it apart (enable_lora), or remove the file"
        )


def check_loaded(
    model: Any,
    info: Mapping[str, Any],
    source: str,
    config: PreTrainedConfig,
    optional: Sequence[str] = (),
) -> None:
    """Checks what transformers says about a model that it loaded; see `check_incoming`.

    Args:
        model: the model, of floats.
        info: what ``output_loading_info`` gave.
        source: the folder or hub name.
        config: what its config.json says.
        optional: see `load_pretrained`.

    Raises:
        ValueError: see `load_pretrained`.
    """
    headers = read_headers(weight_files(source))
    names = ModelNames(model)
    stored = {target: key for key in headers for target in names.of(key)[0]}
    plain = {
        key: headers[key]
        for target, key in stored.items()
        if (own := names.state.get(target)) is not None and own.is_floating_point()
    }
    unread = [stored.get(name, name) for name in info["unexpected_keys"]]
    left_out = LeftOut(model, config, headers)
    check_incoming(
        Incoming(
            source,
            type(model).__name__,
            missing=info["missing_keys"],
            unread=[key for key in unread if key not in left_out],
            plain=plain,
            stored=headers,
            optional=optional,
            read=lambda name: read_tensor(headers[name], name),
        )
    )
