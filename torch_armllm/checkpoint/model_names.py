"""The names that a checkpoint's tensors have in a model, as transformers' own loader maps them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key


class ModelNames:
    """Maps the names of tensors in files to those in a model.

    Attributes:
        mapping: the renamings and conversions of the model's class.
        state: the model's own tensors by name.
    """

    def __init__(self, model: Any) -> None:
        self.mapping = get_model_conversion_mapping(model)
        self.state: dict[str, Tensor] = model.state_dict()
        self._prefix = model.base_model_prefix
        self._renamings = [entry for entry in self.mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in self.mapping if isinstance(entry, WeightConverter)]

    def of(self, key: str) -> tuple[list[str], bool]:
        """Returns the names in the model of a file's tensor, and True if it is converted, not only renamed.

        A name may be none of the model's: then the model does not have the tensor.
        """
        name, pattern = rename_source_key(key, self._renamings, self._converters, self._prefix, self.state)
        if name not in self.state and key in self.state:
            name, pattern = rename_source_key(
                key, [], [], base_model_prefix=self._prefix, meta_state_dict=self.state
            )
        if pattern is None:
            return [name], False
        patterns = next(c.target_patterns for c in self._converters if pattern in c.source_patterns)
        return [name.replace(patterns[0], other) for other in patterns], True
