"""The one call of transformers' ``from_pretrained`` for folders and hub names, and checks around it."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from torch_armllm.checkpoint.incoming import Incoming, check_incoming
from torch_armllm.checkpoint.model_config import config_errors
from torch_armllm.checkpoint.model_names import ModelNames
from torch_armllm.checkpoint.tensor_headers import TensorHeader, read_headers
from torch_armllm.checkpoint.weight_files import find_file, weight_files

ADAPTER = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
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
    with config_errors(source):
        model, info = kind.from_pretrained(
            source, config=config, dtype=dtype, trust_remote_code=False, output_loading_info=True, **options
        )
    if not hasattr(model, "hf_quantizer"):  # the quantizer has checked what it read
        check_loaded(model, info, source, config, optional)
    return model  # type: ignore[no-any-return]


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
    unread = {name: stored.get(name, name) for name in info["unexpected_keys"]}
    left_out = LeftOut(model, config, headers)
    check_incoming(
        Incoming(
            source,
            type(model).__name__,
            missing=info["missing_keys"],
            unread=[key for key in unread.values() if key not in left_out],
            plain=plain,
            stored=headers,
            optional=optional,
            read=lambda name: read_tensor(headers[name], name),
        )
    )


def read_tensor(header: TensorHeader, name: str) -> Tensor:
    """Reads a tensor of a safetensors file."""
    with safe_open(header.file, framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(name)
        return tensor


class LeftOut:
    """The tensors of a checkpoint that belong to parts which a caller's class of model does not have.

    A language model made from a checkpoint of texts and pictures has no vision tower, a base model no head:
    the class that config.json names has them, and its language model is the same.
    """

    def __init__(self, model: Any, config: PreTrainedConfig, headers: Mapping[str, TensorHeader]) -> None:
        """Prepares the question; the class of config.json is only made if it is asked."""
        self._model, self._config = model, config
        prefix = model.base_model_prefix
        is_base = getattr(model, "base_model", None) is model
        self._within = (
            f"{prefix}." if is_base and any(key.startswith(f"{prefix}.") for key in headers) else ""
        )
        self._whole: ModelNames | None = None
        self._ignored: list[re.Pattern[str]] = []

    def __contains__(self, key: str) -> bool:
        """True if the tensor changes nothing that the model computes."""
        if self._within and not key.startswith(self._within):
            return True
        whole = self._class_of_config()
        if whole is None:
            return False
        if self._whole is None:
            with torch.device("meta"):
                made = whole(copy.deepcopy(self._config))
            self._whole = ModelNames(made)
            self._ignored = [re.compile(p) for p in made._keys_to_ignore_on_load_unexpected or ()]
        targets = self._whole.of(key)[0]
        return any(target in self._whole.state for target in targets) or any(
            pattern.search(key) for pattern in self._ignored
        )

    def _class_of_config(self) -> Any:
        name = (getattr(self._config, "architectures", None) or [""])[0]
        whole = getattr(transformers, name, None) if isinstance(name, str) else None
        is_model = isinstance(whole, type) and issubclass(whole, PreTrainedModel)
        fits = is_model and whole.config_class is type(self._config)
        return whole if fits and whole is not type(self._model) else None
