"""Tensors of a checkpoint that belong to parts of its model which were not asked for."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from torch_armllm.checkpoint.model_names import ModelNames
from torch_armllm.checkpoint.tensor_headers import TensorHeader


class LeftOut:
    """Tells the tensors of a checkpoint that a class of model lacks and that change nothing it computes.

    A language model made of a checkpoint of texts and pictures has no vision tower, and a base model has no
    head: the class that config.json names has them, around the same language model.
    """

    def __init__(self, model: Any, config: PreTrainedConfig, headers: Mapping[str, TensorHeader]) -> None:
        """Prepares the question; the class of config.json is only made if it is asked.

        Args:
            model: the loaded model.
            config: of the whole checkpoint.
            headers: of all its tensors.
        """
        self._model, self._config = model, config
        prefix = f"{model.base_model_prefix}."
        is_base = model.base_model is model and any(key.startswith(prefix) for key in headers)
        self._within = prefix if is_base else ""
        self._whole: ModelNames | None = None

    def __contains__(self, key: str) -> bool:
        if self._within and not key.startswith(self._within):
            return True
        kind = self._class_of_config()
        if kind is None:
            return False
        if self._whole is None:
            with torch.device("meta"):
                self._whole = ModelNames(kind(copy.deepcopy(self._config)))
        if any(target in self._whole.state for target in self._whole.of(key)[0]):
            return True
        return any(re.search(pattern, key) for pattern in kind._keys_to_ignore_on_load_unexpected or ())

    def _class_of_config(self) -> Any:
        """Returns the class that config.json names, if it is another one than the model's."""
        name = str((self._config.architectures or [""])[0])
        kind: Any = getattr(transformers, name, None)
        fits = isinstance(kind, type) and issubclass(kind, PreTrainedModel)
        own = fits and kind.config_class is type(self._config) and kind is not type(self._model)
        return kind if own else None
