"""The check of a folder that was just written: it is read back, by names and shapes."""

from __future__ import annotations

import copy
from pathlib import Path

from torch_armllm.checkpoint.empty_model import empty_model
from torch_armllm.checkpoint.incoming import Incoming, check_incoming
from torch_armllm.checkpoint.load import auto_class
from torch_armllm.checkpoint.model_config import read_config
from torch_armllm.checkpoint.model_fit import check_fit, unread_tensors
from torch_armllm.checkpoint.model_names import ModelNames
from torch_armllm.checkpoint.saved_metadata import check_record
from torch_armllm.checkpoint.tensor_headers import read_headers
from torch_armllm.checkpoint.weight_files import SAFETENSORS, weight_files
from torch_armllm.quant.config import ArmInt4Config
from torch_armllm.quant.skeleton import build_skeleton, forget_ties


def check_written(folder: Path) -> None:
    """Reads a quantized folder back without its values, as a load would; what cannot be loaded is no model.

    Raises:
        ValueError: a tensor is missing, too many or of another shape, or a setting cannot be read; the
            config.json, which makes the folder a model, is then removed.
    """
    try:
        _check(folder)
    except ValueError as error:
        (folder / "config.json").unlink(missing_ok=True)
        raise ValueError(
            f"{folder} could not be read back, so that its config.json was removed: {error}"
        ) from error


def _check(folder: Path) -> None:
    config = read_config(str(folder))
    settings = ArmInt4Config.from_dict(config.quantization_config)
    headers = read_headers(weight_files(str(folder), SAFETENSORS))
    check_record(headers, settings.modules)
    plain = copy.deepcopy(config)
    del plain.quantization_config
    model = empty_model(auto_class(plain), plain, str(folder))
    build_skeleton(model, settings)
    forget_ties(model)
    names = ModelNames(model)
    stored = {target for key in headers for target in names.of(key)[0]}
    tensors = model.state_dict(keep_vars=True)
    read = {id(tensor) for name, tensor in tensors.items() if name in stored}
    ties = dict(model.all_tied_weights_keys)
    tied = {one for pair in ties.items() if stored & set(pair) for one in pair}
    missing = [name for name, tensor in tensors.items() if id(tensor) not in read and name not in tied]
    optional = tuple(model._keys_to_ignore_on_load_missing or ())
    check_incoming(
        Incoming(
            str(folder),
            type(model).__name__,
            missing=missing,
            unread=unread_tensors(headers, model, names),
            stored=headers,
            optional=optional,
        )
    )
    check_fit(headers, model)
