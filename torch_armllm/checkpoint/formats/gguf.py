"""GGUF files: types that a scheme holds exactly keep their integers, other types are requantized.

transformers provides the configurations and tokenizers of GGUF's architectures, and the ``gguf`` package the
names, but no float model is built.  Rows that llama.cpp permuted are permuted back as integers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from torch_armllm.checkpoint.formats.gguf_config import extra_blocks, read_config
from torch_armllm.checkpoint.formats.gguf_experts import HALVES, ExpertReader
from torch_armllm.checkpoint.formats.gguf_file import GgufFile
from torch_armllm.checkpoint.formats.gguf_header import Header
from torch_armllm.checkpoint.formats.gguf_names import tensor_names
from torch_armllm.checkpoint.formats.gguf_parts import first_part
from torch_armllm.checkpoint.formats.gguf_rope import TENSORS as ROPE_TENSORS
from torch_armllm.checkpoint.formats.gguf_types import EXACT
from torch_armllm.checkpoint.formats.gguf_values import Values
from torch_armllm.checkpoint.formats.gguf_weights import WeightReader
from torch_armllm.checkpoint.formats.integer_weight import IntegerWeight, LazyWeight
from torch_armllm.checkpoint.formats.requantizer import Requantizer
from torch_armllm.checkpoint.formats.third_party_checkpoint import ThirdPartyCheckpoint
from torch_armllm.checkpoint.incoming import Incoming, check_incoming
from torch_armllm.checkpoint.model_config import config_errors
from torch_armllm.checkpoint.tensor_headers import TensorHeader

_BLOCK = re.compile(r"blk\.(\d+)\.")
_EMBEDDING = "token_embd.weight"
_BIASED = re.compile(r"\.(?:[qkvo]_proj|gate_proj|up_proj|down_proj)\.bias")
"""Biases that one setting of transformers adds together, and that a file may have some of."""


def read_file(path: str, dequantize: bool = False) -> ThirdPartyCheckpoint:
    """Opens a GGUF file, or a split one by any of its parts; ``dequantize`` returns its weights as floats.

    Raises:
        ImportError: the ``gguf`` package is not installed.
        ValueError: the file is damaged, a part is missing, or its architecture, a setting, a tensor or a type
            is not supported.
    """
    file = GgufFile(path)
    config, header = read_config(file)
    return GgufReader(file, config, header, dequantize).read()


class GgufReader:
    """Maps a file's tensors to the names and row order of transformers' model."""

    def __init__(
        self, file: GgufFile, config: PreTrainedConfig, header: Header, dequantize: bool = False
    ) -> None:
        self._file, self._path, self._config, self._header = file, file.path, config, header
        self._dequantize = dequantize
        self._text = config.get_text_config(decoder=True)
        self._untie()
        with config_errors(self._path):
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
            values = Values(file.architecture, self._text.to_dict())
        self._targets = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._blocks = int(self._text.num_hidden_layers)
        try:
            self._names = tensor_names(file.architecture, self._blocks, self._targets)
        except ValueError as error:
            raise ValueError(f"{self._path} cannot be read: {error}") from error
        self._requantizer = Requantizer()
        self._weights = WeightReader(file, values, self._requantizer, dequantize)
        self._experts = ExpertReader(file, model, self._weights)

    def read(self) -> ThirdPartyCheckpoint:
        """Returns the checkpoint; each weight is read on use."""
        weights: dict[str, Any] = {}
        unread, notes, extra = [], [], 0
        last = self._blocks + extra_blocks(self._header)
        for name in self._file.tensors:
            block = int(found[1]) if (found := _BLOCK.match(name)) else 0
            if block >= last:
                raise ValueError(
                    f"{self._path} holds {name}, and its header says that there are {last} blocks: the file "
                    "is damaged"
                )
            target = self._names.get(name)
            if block >= self._blocks:
                extra += 1
            elif target is not None and target in self._targets:
                self._check_shape(name, self._targets[target])
                embedding = name == _EMBEDDING and not self._dequantize
                read = partial(self._file.matrix, name) if embedding else self._reader_of(name)
                weights[target] = LazyWeight(read)
            elif not (HALVES.fullmatch(name) or name in ROPE_TENSORS):
                unread.append(name)
        weights.update(self._experts.read())
        if _EMBEDDING in self._file.tensors and self._untied:
            head = next(name for name in self._targets if name.endswith("lm_head.weight"))
            weights[head] = LazyWeight(self._reader_of(_EMBEDDING))
        self._add_zero_biases(weights)
        if extra:
            notes.append(f"{extra} tensors that predict further tokens (nextn_predict_layers) are not used")
        self._check(weights, unread + self._experts.unread)
        return ThirdPartyCheckpoint(
            "gguf", self._path, self._config, weights, notes, self._dequantize, self._requantizer
        )

    def _check(self, weights: dict[str, Any], unread: list[str]) -> None:
        """Raises ValueError if a weight is missing, or nobody reads a tensor or a field of the header."""
        missing = sorted(set(self._targets) - set(weights) - set(self._tied()))
        if missing:
            raise ValueError(f"{self._path} has no {missing[0]}: it is incomplete or of another model")
        check_incoming(
            Incoming(
                self._path,
                f"transformers' {self._config.model_type}",
                unread=unread,
                fields=self._header.unread(),
                stored={name: self._header_of(name) for name in unread},
                read=self._file.floats,
            )
        )

    def _header_of(self, name: str) -> TensorHeader:
        return TensorHeader(self._path, self._file.type_name(name), tuple(self._file.shape(name)))

    def _check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        """Raises ValueError if a vector or matrix has another shape than in the model."""
        found = tuple(self._file.shape(name))
        if len(found) == len(expected) <= 2 and found not in (expected, expected[::-1]):
            raise ValueError(
                f"{name} has the shape {found} in {self._path}, and {expected} is expected by its header: "
                "the file is damaged"
            )

    def _untie(self) -> None:
        """Unties the head if a scheme holds the embedding's integers exactly: the head then keeps them."""
        kind = self._file.type_name(_EMBEDDING) if _EMBEDDING in self._file.tensors else ""
        self._untied = bool(self._text.tie_word_embeddings) and kind in EXACT and not self._dequantize
        if self._untied:
            self._config.tie_word_embeddings = self._text.tie_word_embeddings = False

    def _tied(self) -> list[str]:
        tied = self._text.tie_word_embeddings
        return [name for name in self._targets if name.endswith("lm_head.weight")] if tied else []

    def _add_zero_biases(self, weights: dict[str, Any]) -> None:
        """Adds the biases that a setting brings along with those of the file."""
        for name, shape in self._targets.items():
            if name not in weights and _BIASED.search(name):
                weights[name] = torch.zeros(shape)

    def _reader_of(self, name: str) -> Callable[[], IntegerWeight | Tensor]:
        return lambda: self._weights.read(name, self._weights.scheme(name))


def tokenizer_options(file: str) -> tuple[str, dict[str, Any]]:
    """Returns the arguments with which `from_pretrained` reads the tokenizer of a GGUF file."""
    path = Path(first_part(file))
    return str(path.parent), {"gguf_file": path.name}
