"""AutoAWQ's layouts: ``w = s · (q − z)``, eight outputs (``gemm``) or inputs (``gemv``) per int32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from torch_armllm.checkpoint.formats.bit_unpacking import centered, integer_weight, unpack
from torch_armllm.checkpoint.formats.integer_weight import IntegerWeight
from torch_armllm.checkpoint.formats.part_headers import PartHeaders
from torch_armllm.checkpoint.formats.settings import group_count, integer
from torch_armllm.checkpoint.formats.tensor_files import ModuleReader, read_folder
from torch_armllm.checkpoint.formats.third_party_checkpoint import ThirdPartyCheckpoint

_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibbles of the outputs 0…7: the nibbles of an int32 hold the outputs 0, 2, 4, 6, 1, 3, 5, 7."""

_PADDED = {32: 4, 64: 2}
"""By group size: a row of ``gemv``'s zero points is padded to a multiple of so many int32."""


class AwqReader(ModuleReader):
    """``qweight`` int32 (K, N/8), ``qzeros`` int32 (S, N/8), ``scales`` float16 (S, N)."""

    marker = "qweight"
    parts = ("qzeros", "scales")

    def __init__(self, group: int) -> None:
        super().__init__()
        self._group = group

    def declared_shape(self, name: str, parts: PartHeaders) -> tuple[int, int]:  # noqa: D102
        columns, words = parts.matrix("qweight", "I32", "U32")
        groups = group_count(self._group, columns)
        parts.expect("scales", (groups, words * 8))
        parts.expect("qzeros", (groups, words), "I32", "U32")
        return words * 8, columns

    def decode(self, name: str, parts: Mapping[str, Tensor]) -> IntegerWeight:  # noqa: D102
        q = unpack(parts["qweight"].t().contiguous(), 4, 0, _NIBBLES)
        zeros = unpack(parts["qzeros"], 4, 1, _NIBBLES).t().to(torch.int16) - 8
        return integer_weight(centered(q, 4), parts["scales"].t(), zeros, self._group, self.requantizer)


class AwqGemvReader(AwqReader):
    """``qweight`` int32 (N, K/8), ``qzeros`` int32 (N, Z) and ``scales`` float16 (N, 8·Z), padded groups."""

    def declared_shape(self, name: str, parts: PartHeaders) -> tuple[int, int]:  # noqa: D102
        rows, words = parts.matrix("qweight", "I32", "U32")
        columns = words * 8
        multiple = _PADDED.get(self._group, 1)
        width = -(-group_count(self._group, columns) // (8 * multiple)) * multiple
        parts.expect("qzeros", (rows, width), "I32", "U32")
        parts.expect("scales", (rows, width * 8))
        return rows, columns

    def decode(self, name: str, parts: Mapping[str, Tensor]) -> IntegerWeight:  # noqa: D102
        q = unpack(parts["qweight"], 4, 1)
        count = 1 if self._group <= 0 else -(-q.shape[1] // self._group)
        zeros = unpack(parts["qzeros"], 4, 1)[:, :count].to(torch.int16) - 8
        return integer_weight(
            centered(q, 4), parts["scales"][:, :count], zeros, self._group, self.requantizer
        )


_VERSIONS = {"gemm": AwqReader, "gemv": AwqGemvReader}


def read(source: str, config: PreTrainedConfig, settings: dict[str, Any]) -> ThirdPartyCheckpoint:
    """Opens a checkpoint that AutoAWQ wrote.

    Raises:
        ValueError: the version is another one than ``gemm`` or ``gemv``, or the weights do not have 4 bits.
    """
    bits, version = settings.get("bits", settings.get("w_bit")), str(settings.get("version", "gemm")).lower()
    if bits != 4:
        raise ValueError(f"weights of {bits} bits: AWQ of 4 bits can be read")
    if version not in _VERSIONS:
        raise ValueError(f"version {version!r}: the layouts of {' and '.join(_VERSIONS)} can be read")
    if settings.get("zero_point", True) is not True:
        raise ValueError("zero_point is off: files with zero points can be read")
    group = integer(settings, "group_size", integer(settings, "q_group_size", 128))
    return read_folder(source, config, "awq", _VERSIONS[version](group))
