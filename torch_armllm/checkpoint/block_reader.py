"""Loading of a float checkpoint into a model on the meta device, one block of layers at a time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.core_model_loading import (
    convert_and_load_state_dict_in_model,
    dot_natural_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from torch_armllm.checkpoint.incoming import Incoming, check_incoming
from torch_armllm.checkpoint.left_out import LeftOut
from torch_armllm.checkpoint.model_fit import check_fit, unread_tensors
from torch_armllm.checkpoint.model_names import ModelNames
from torch_armllm.checkpoint.tensor_headers import TensorHeader, read_headers, read_tensor

_BLOCK = re.compile(r"(.*?\.\d+)\.")
"""A decoder layer: a name up to its first number, inclusive."""


class BlockReader:
    """Loads a model on the meta device block by block; release each block before you load the next.

    A block is a decoder layer, or a module outside of them, such as the embedding.

    Attributes:
        blocks: the names of the blocks, in the model's order.
    """

    def __init__(self, model: Any, files: Sequence[Path]) -> None:
        """Assigns the tensors of the ``files`` to blocks.

        Raises:
            ValueError: a file is damaged, or no file has some of the model's tensors.
        """
        self._model, self._source = model, files[0].parent
        names_of = ModelNames(model)
        self._mapping = names_of.mapping
        self._ties = _tied(model)
        self._keys: dict[str, list[tuple[str, Path]]] = defaultdict(list)
        available: set[str] = set()
        headers = read_headers(files)
        unread = unread_tensors(headers, model, names_of)
        for key, header in headers.items():
            names, _ = names_of.of(key)
            available.update(names)
            if any(name in names_of.state for name in names):
                self._keys[block_of(names[0])].append((key, Path(header.file)))
        self._check(headers, self._missing(set(names_of.state) - available), unread)
        check_fit(headers, model)
        # the head comes after the base model, whether or not it is tied to the embedding
        self.blocks = sorted(
            self._keys, key=lambda block: (not _BLOCK.match(f"{block}."), dot_natural_key(block))
        )

    def load(self, block: str) -> None:
        """Loads a block's tensors, and the parameters tied to them.

        Raises:
            ValueError: a tensor does not match the model.
        """
        by_file: dict[Path, list[str]] = defaultdict(list)
        for key, file in self._keys[block]:
            by_file[file].append(key)
        bar = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            with ExitStack() as opened:
                tensors: dict[str, Any] = {}
                for file, keys in by_file.items():
                    reader = opened.enter_context(safe_open(file, framework="pt"))
                    tensors.update((key, reader.get_slice(key)) for key in keys)
                info, _ = convert_and_load_state_dict_in_model(self._model, tensors, self._config())
        finally:
            if bar:
                logging.enable_progress_bar()
        for problem in (info.mismatched_keys, info.conversion_errors, info.error_msgs):
            if problem:
                raise ValueError(
                    f"the checkpoint does not fit the model ({next(iter(problem))}): config.json belongs to "
                    "another checkpoint"
                )
        for uses in self._ties:
            parameters = [module._parameters[name] for _, module, name in uses]
            real = next((p for p in parameters if p is not None and not p.is_meta), None)
            for _, module, name in uses if real is not None else ():
                module._parameters[name] = real

    def loaded_tensors(self) -> dict[str, Tensor]:
        """Returns the tensors in memory, by their names in a checkpoint; tied tensors once."""
        loaded: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if not tensor.is_meta and id(tensor) not in seen:
                seen.add(id(tensor))
                loaded[name] = tensor.detach()
        tensors: dict[str, Tensor] = revert_weight_conversion(self._model, loaded)
        return tensors

    def release(self) -> None:
        """Moves all loaded tensors back to the meta device."""
        replaced = [module for uses in self._ties for _, module, _ in uses]  # perhaps no longer in the model
        for module in (*self._model.modules(), *replaced):
            for name, parameter in module._parameters.items():
                if parameter is not None and not parameter.is_meta:
                    empty = torch.empty_like(parameter, device="meta")
                    module._parameters[name] = nn.Parameter(empty, requires_grad=False)
            for name, buffer in module._buffers.items():
                stays = name in module._non_persistent_buffers_set
                if buffer is not None and not buffer.is_meta and not stays:
                    module._buffers[name] = torch.empty_like(buffer, device="meta")

    def _missing(self, missing: set[str]) -> list[str]:
        """Returns the tensors that no file holds, without those that are tied to another one."""
        for uses in self._ties:
            names = {name for name, _, _ in uses}
            if not names <= missing:
                missing = missing - names
        allowed = self._model._keys_to_ignore_on_load_missing or []
        return sorted(name for name in missing if not any(re.search(pattern, name) for pattern in allowed))

    def _check(
        self, headers: Mapping[str, TensorHeader], missing: Sequence[str], unread: Sequence[str]
    ) -> None:
        left_out = LeftOut(self._model, self._model.config, headers)
        check_incoming(
            Incoming(
                str(self._source),
                type(self._model).__name__,
                missing=missing,
                unread=[name for name in unread if name not in left_out],
                stored=headers,
                read=lambda name: read_tensor(headers[name], name),
            )
        )

    def _config(self) -> LoadStateDictConfig:
        dtype = self._model.dtype
        return LoadStateDictConfig(
            device_map={"": "cpu"},
            dtype=dtype,
            dtype_plan=self._model._get_dtype_plan(dtype),
            weight_mapping=self._mapping,
        )


def _tied(model: nn.Module) -> list[list[tuple[str, nn.Module, str]]]:
    """Returns the names, modules and attributes of each parameter that several modules share."""
    uses: dict[int, list[tuple[str, nn.Module, str]]] = defaultdict(list)
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                uses[id(parameter)].append((f"{path}.{name}", module, name))
    return [several for several in uses.values() if len(several) > 1]


def block_of(name: str) -> str:
    """Returns the name of the block of a model's tensor."""
    match = _BLOCK.match(name)
    return match.group(1) if match else name.rpartition(".")[0]
