"""GGUF files: types that a scheme holds exactly keep their integers, other types are requantized.

transformers provides the names, configurations and tokenizers of GGUF's architectures, but no float model is
built.  Rows that llama.cpp permuted are permuted back as integers.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from torch_armllm.checkpoint.formats.gguf_blocks import EXACT, SCHEME_OF, decode, with_zero_offsets
from torch_armllm.checkpoint.formats.gguf_config import read_config
from torch_armllm.checkpoint.formats.integer_weight import CHUNK, IntegerWeight, LazyRows, LazyWeight, stacked
from torch_armllm.checkpoint.formats.requantizer import Requantizer
from torch_armllm.checkpoint.formats.third_party_checkpoint import ThirdPartyCheckpoint
from torch_armllm.checkpoint.model_config import config_errors
from torch_armllm.quant.packing import in_scale_range
from torch_armllm.quant.parallel import each
from torch_armllm.quant.schemes.base import Quantized, joined_rows, row_chunks
from torch_armllm.system.extras import install_command

_FLOATS = ("F32", "F16", "BF16", "F64")
_EXPERTS = re.compile(r"(blk\.\d+)\.ffn_(gate|up|down)_exps\.weight")
_BLOCK = re.compile(r"blk\.(\d+)\.")
_EMBEDDING = "token_embd.weight"
_ALL = slice(None)
_OWN: tuple[Literal["C"], Literal["W"]] = ("C", "W")
"""Requirements of `np.require`: copies only mapped or non-contiguous arrays, since embeddings are large."""
_COMMON: tuple[tuple[set[str | None], str | None], ...] = (
    ({None}, None),
    ({"g32"}, "g32"),
    ({"g32", "g32m"}, "g32m"),
    ({"int8g32"}, "int8g32"),
    ({"int8g32", "int8g32m"}, "int8g32m"),
)
"""Schemes of the experts' matrices, and the scheme that holds all of them exactly."""
_NARROW_BITS = 4.4
"""Types with fewer bits per weight are rounded to 4 bits, others to 8."""

_LONGEST_ARRAY = 1 << 24
"""Vocabularies and their merges are the longest arrays of a header."""


class GgufFile:
    """An opened GGUF file.

    Attributes:
        tensors: the tensors by name, as the ``gguf`` package maps them.
        fields: the fields of its header by name.
        architecture: llama.cpp's name of the architecture.
    """

    def __init__(self, path: str) -> None:
        try:
            import gguf
        except ImportError:
            raise ImportError(f"GGUF files need gguf: {install_command('gguf')}") from None
        self._gguf = gguf
        try:
            self._reader = _bounded_reader(gguf, path)
            self.fields: dict[str, Any] = self._reader.fields
            self.architecture = str(self.fields["general.architecture"].contents())
        except Exception as error:  # whatever the header's bytes lead the package to
            raise ValueError(f"{path} is damaged or no GGUF file ({error}): download it again") from error
        self._path = path
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._check_offsets()
        self._check_blocks()

    def _check_offsets(self) -> None:
        """Raises ValueError if tensors overlap, end behind the file, or have a wrong alignment or rank."""
        end, before, size = 0, "the header", Path(self._path).stat().st_size
        for name, tensor in sorted(self.tensors.items(), key=lambda item: int(item[1].data_offset)):
            begin, length = int(tensor.data_offset), int(tensor.n_bytes)
            if begin % self._reader.alignment:
                raise ValueError(
                    f"{name} in {self._path} begins at byte {begin}, and a multiple of "
                    f"{self._reader.alignment} is expected: the file is damaged"
                )
            if begin < end:
                raise ValueError(
                    f"{name} in {self._path} begins at byte {begin}, and {before} before it ends at {end}: "
                    "the file is damaged"
                )
            if begin + length > size:
                raise ValueError(
                    f"{name} in {self._path} ends at byte {begin + length}, and the file has {size}: it is "
                    "cut short"
                )
            if not 1 <= len(tensor.shape) <= 3 or int(tensor.n_elements) == 0:
                raise ValueError(
                    f"{name} in {self._path} has the shape {self.shape(name)}, and one to three sizes are "
                    "expected"
                )
            end, before = begin + length, name

    def _check_blocks(self) -> None:
        """Raises ValueError if the header counts more blocks than have tensors.

        The map of names takes time that grows with the square of this count.
        """
        field = self.fields.get(f"{self.architecture}.block_count")
        count = None if field is None else field.contents()
        numbers = [int(found[1]) for name in self.tensors if (found := re.match(r"blk\.(\d+)\.", name))]
        if isinstance(count, int) and count > 1 + max(numbers, default=-1):
            raise ValueError(
                f"{self._path} says that it has {count} blocks, and its tensors are of "
                f"{1 + max(numbers, default=-1)}: the file is damaged"
            )

    def type_name(self, name: str) -> str:
        """Returns the type of a tensor, such as ``Q4_1``."""
        return str(self.tensors[name].tensor_type.name)

    def bits(self, name: str) -> float:
        """Returns the bits per weight of a tensor."""
        tensor = self.tensors[name]
        return 8 * float(tensor.n_bytes) / float(tensor.n_elements)

    def shape(self, name: str) -> list[int]:
        """Returns the shape of a tensor, rows before columns."""
        return [int(size) for size in reversed(self.tensors[name].shape)]

    def floats(self, name: str, rows: slice = _ALL) -> Tensor:
        """Returns a tensor of any type, or some of its rows, as float32."""
        tensor = self.tensors[name]
        if self.type_name(name) == "BF16":
            return torch.from_numpy(np.array(tensor.data[rows])).view(torch.bfloat16).float()
        try:
            value = self._gguf.dequantize(tensor.data[rows], tensor.tensor_type)
        except NotImplementedError as error:
            raise ValueError(
                f"{name} is of type {self.type_name(name)}, which the gguf package cannot decode"
            ) from error
        return torch.from_numpy(np.require(value, np.float32, _OWN))

    def release(self) -> None:
        """Drops the pages that were read from the process's memory; the page cache may keep them."""
        mapping: Any = getattr(self._reader.data, "_mmap", None)
        if hasattr(mapping, "madvise") and hasattr(mmap, "MADV_DONTNEED"):
            mapping.madvise(mmap.MADV_DONTNEED)

    def matrix(self, name: str) -> LazyRows:
        """Returns a tensor (rows, columns) as floats that are decoded on use."""
        return LazyRows(self.shape(name), lambda rows: self.floats(name, rows))

    def integers(self, name: str) -> IntegerWeight:
        """Returns a tensor of a type of `EXACT`: (rows, columns), or experts' (E, rows, columns)."""
        kind, data = self.type_name(name), self.tensors[name].data

        def part(rows: slice | int) -> Quantized:
            found = decode(kind, torch.from_numpy(np.array(data[rows])))
            offsets = found.scales if found.offsets is None else found.offsets
            if not (in_scale_range(found.scales) and in_scale_range(offsets)):
                raise ValueError(
                    f"{name} in {self._path} has a scale that is NaN, infinite or above 2^100: the file is "
                    "damaged; download it again"
                )
            return found

        if data.ndim == 2:
            rows, columns = self.shape(name)
            return IntegerWeight(joined_rows(each(part, row_chunks(rows, columns, CHUNK))))
        return stacked([IntegerWeight(one) for one in each(part, range(len(data)))])


def _bounded_reader(gguf: Any, path: str) -> Any:
    """Opens a file by a reader that refuses lengths that the file cannot have, instead of counting to them.

    Raises:
        ValueError: a field or tensor ends behind the file, or an array is too long.
    """

    class Reader(gguf.GGUFReader):  # type: ignore[misc,name-defined]  # imported on use
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            end = offset + np.dtype(dtype).itemsize * int(count)
            if end > len(self.data):
                raise ValueError(f"a part ends at byte {end}, and the file has {len(self.data)}: cut short?")
            return super()._get(offset, dtype, count, override_order)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type == gguf.GGUFValueType.ARRAY:
                length = int(self._get(orig_offs + 4, np.uint64)[0])
                if length > _LONGEST_ARRAY:
                    raise ValueError(f"an array of its header has {length} items")
            return super()._get_field_parts(orig_offs, raw_type)

    return Reader(path)


def read_file(path: str, dequantize: bool = False) -> ThirdPartyCheckpoint:
    """Opens a GGUF file; ``dequantize`` returns its weights as floats.

    Raises:
        ImportError: the ``gguf`` package is not installed.
        ValueError: the file is damaged, or its architecture or a type is not supported.
    """
    file = GgufFile(path)
    config = read_config(path, file.architecture, file.fields)
    return GgufReader(file, path, config, dequantize).read()


class GgufReader:
    """Maps a file's tensors to the names and row order of transformers' model."""

    def __init__(self, file: GgufFile, path: str, config: PreTrainedConfig, dequantize: bool = False) -> None:
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )

        self._file, self._path, self._config = file, path, config
        self._dequantize = dequantize
        self._requantizer = Requantizer()
        self._untie()
        with config_errors(path):
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
            processor: Any = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)
            self._processor = processor(config=config.get_text_config(decoder=True).to_dict())
            family = "llama" if config.model_type == "mixtral" else None
            self._names: dict[str, str] = get_gguf_hf_weights_map(model, self._processor, family)
        self._targets = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        count = file.fields.get(f"{file.architecture}.block_count")
        layers = config.get_text_config(decoder=True).num_hidden_layers
        self._blocks = max(layers, 0 if count is None else int(count.contents()))

    def read(self) -> ThirdPartyCheckpoint:
        """Returns the checkpoint; each weight is read on use."""
        weights: dict[str, Any] = {}
        experts: dict[str, dict[str, str]] = {}
        for name in self._file.tensors:
            if (block := _BLOCK.match(name)) and int(block[1]) >= self._blocks:
                raise ValueError(
                    f"{self._path} holds {name}, and its header says that there are {self._blocks} blocks: "
                    "the file is damaged"
                )
            if match := _EXPERTS.fullmatch(name):
                experts.setdefault(match[1], {})[match[2]] = name
            elif (target := self._names.get(name)) is not None and target in self._targets:
                embedding = name == _EMBEDDING and not self._dequantize
                self._check_shape(name, self._targets[target])
                weights[target] = LazyWeight(
                    partial(self._file.matrix, name) if embedding else self._reader_of(name)
                )
        for layer, parts in experts.items():
            weights.update(self._experts(layer, parts))
        if _EMBEDDING in self._file.tensors and self._untied:
            head = next(name for name in self._targets if name.endswith("lm_head.weight"))
            weights[head] = LazyWeight(self._reader_of(_EMBEDDING))
        missing = sorted(set(self._targets) - set(weights) - set(self._tied()))
        if missing:
            raise ValueError(f"{self._path} has no {missing[0]}: it is incomplete or of another model")
        return ThirdPartyCheckpoint(
            "gguf", self._path, self._config, weights, [], self._dequantize, self._requantizer
        )

    def _check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        """Raises ValueError if a vector or matrix has another shape than in the model."""
        found = tuple(self._file.shape(name))
        if len(found) == len(expected) <= 2 and found != expected:
            raise ValueError(
                f"{name} has the shape {found} in {self._path}, and {expected} is expected by its header: "
                "the file is damaged"
            )

    def _untie(self) -> None:
        """Unties the head if a scheme holds the embedding's integers exactly: the head then keeps them."""
        text = self._config.get_text_config(decoder=True)
        kind = self._file.type_name(_EMBEDDING) if _EMBEDDING in self._file.tensors else ""
        self._untied = bool(text.tie_word_embeddings) and kind in EXACT and not self._dequantize
        if self._untied:
            self._config.tie_word_embeddings = text.tie_word_embeddings = False

    def _tied(self) -> list[str]:
        tied = self._config.get_text_config(decoder=True).tie_word_embeddings
        return [name for name in self._targets if name.endswith("lm_head.weight")] if tied else []

    def _reader_of(self, name: str) -> Callable[[], IntegerWeight | Tensor]:
        return lambda: self._weight(name, self._scheme(name))

    def _scheme(self, name: str) -> str | None:
        """Returns the scheme of a tensor; None if it stays floats."""
        kind = self._file.type_name(name)
        if self._dequantize or kind in _FLOATS or len(self._file.tensors[name].shape) < 2:
            return None
        return SCHEME_OF.get(kind) or ("g32m" if self._file.bits(name) < _NARROW_BITS else "int8g32")

    def _weight(self, name: str, scheme: str | None) -> IntegerWeight | Tensor:
        """Returns a tensor in transformers' row order."""
        self._file.release()  # the tensors before it are packed
        kind = self._file.type_name(name)
        if scheme is None:
            value = self._file.floats(name).numpy()
            return torch.from_numpy(np.require(self._processor.process(value, name).weights, None, _OWN))
        if kind in EXACT and SCHEME_OF[kind] == scheme:
            weight = self._file.integers(name)
        elif kind in EXACT and f"{SCHEME_OF[kind]}m" == scheme:
            weight = IntegerWeight(with_zero_offsets(self._file.integers(name).quantized))
        else:
            weight = self._requantized(name, scheme, kind)
        permutation = self._row_permutation(name, weight.shape[-2])
        return weight if permutation is None else weight.rows(permutation)

    def _requantized(self, name: str, scheme: str, kind: str) -> IntegerWeight:
        """Requantizes a tensor of a type that no scheme holds, a few rows at a time."""
        file, (*experts, rows, columns) = self._file, self._file.shape(name)
        if not experts:
            return self._requantizer.requantize_rows(
                lambda part: file.floats(name, part), (rows, columns), scheme, kind
            )
        matrices = (file.floats(name, slice(expert, expert + 1))[0] for expert in range(experts[0]))
        return stacked([self._requantizer.requantize(expert, scheme, kind) for expert in matrices])

    def _row_permutation(self, name: str, rows: int) -> Tensor | None:
        """Returns the file's row for each row of transformers' weight; None if the orders are the same."""
        if len(self._file.tensors[name].shape) != 2:
            return None
        index = np.arange(rows)[:, None]
        permutation = torch.from_numpy(np.array(self._processor.process(index, name).weights)[:, 0])
        return None if torch.equal(permutation, torch.arange(rows)) else permutation

    def _experts(self, layer: str, parts: dict[str, str]) -> dict[str, LazyWeight]:
        """Returns merged gates and ups, and downs, all in one scheme, as the fused op requires."""
        schemes = {self._scheme(name) for name in parts.values()}
        scheme = next((wide for own, wide in _COMMON if schemes <= own), "g32m")

        def inner() -> Any:
            halves: Any = [self._weight(parts[half], scheme) for half in ("gate", "up")]
            return torch.cat(halves, 1)

        names = {half: self._target(layer, half) for half in ("gate", "down")}
        return {
            names["gate"]: LazyWeight(inner),
            names["down"]: LazyWeight(lambda: self._weight(parts["down"], scheme)),
        }

    def _target(self, layer: str, half: str) -> str:
        number = layer.removeprefix("blk.")
        attribute = "down_proj" if half == "down" else "gate_up_proj"
        targets = [self._names.get(f"{layer}.ffn_{half}_exps{suffix}") for suffix in ("", ".weight")]
        if self._config.model_type == "mixtral":
            targets.append(f"model.layers.{number}.mlp.experts.{attribute}")
        for target in targets:
            if target in self._targets:
                return str(target)
        raise ValueError(f"{self._path}: experts of architecture {self._file.architecture!r} cannot be read")


def tokenizer_options(file: str) -> tuple[str, dict[str, Any]]:
    """Returns the arguments with which `from_pretrained` reads the tokenizer of a GGUF file."""
    path = Path(file)
    return str(path.parent), {"gguf_file": path.name}
