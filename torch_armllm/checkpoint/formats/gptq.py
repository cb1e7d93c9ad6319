"""GPTQ's layouts, versions 1 and 2: ``w = s · (q − z)``, 8 inputs of 4 bits (or 4 of 8) per int32."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from torch_armllm.checkpoint.formats.bit_unpacking import (
    INT8_SCHEME,
    centered,
    group_permutation,
    integer_weight,
    unpack,
)
from torch_armllm.checkpoint.formats.gptq_dynamic import Dynamic
from torch_armllm.checkpoint.formats.integer_weight import IntegerWeight
from torch_armllm.checkpoint.formats.part_headers import PartHeaders
from torch_armllm.checkpoint.formats.settings import flag, group_count, integer
from torch_armllm.checkpoint.formats.tensor_files import ModuleReader, read_folder
from torch_armllm.checkpoint.formats.third_party_checkpoint import ThirdPartyCheckpoint

_EXPERT = re.compile(r"\.experts\.\d+\.")


class _Layout(NamedTuple):
    """The layout of a module."""

    bits: int
    group: int
    symmetric: bool
    act_order: bool

    @staticmethod
    def of(settings: Mapping[str, Any]) -> _Layout:
        """Reads the settings of a module.

        Raises:
            ValueError: its weights do not have 4 or 8 bits.
        """
        bits, group = integer(settings, "bits", 0), integer(settings, "group_size", 128)
        if bits not in (4, 8):
            raise ValueError(f"weights of {bits} bits: GPTQ of 4 and 8 bits can be read")
        ordered = flag(settings, "desc_act", False) and not flag(settings, "static_groups", False)
        return _Layout(bits, group, flag(settings, "sym", True), ordered and group > 0)


class GptqReader(ModuleReader):
    """``qweight`` int32 (K/8, N), ``qzeros`` int32 (S, N/8), ``scales`` (S, N) and ``g_idx`` int32 (K,).

    Version 1 stores ``z − 1``, in as many bits as the weights have.  ``g_idx`` is the group of each input; if
    it is not monotone (``desc_act``), columns are sorted by group.  Experts share their inputs, but each has
    a permutation of its own: their weights are requantized instead.  Modules may have settings of their own;
    see `Dynamic`.
    """

    marker = "qweight"
    parts = ("qzeros", "scales", "g_idx")

    def __init__(self, settings: Mapping[str, Any], version: int) -> None:
        super().__init__()
        self._version = version
        self._dynamic = Dynamic(settings)
        self._layout = None if self._dynamic else _Layout.of(settings)

    def _layout_of(self, name: str) -> _Layout:
        if self._layout is not None:
            return self._layout
        try:
            return _Layout.of(self._dynamic.settings_of(name))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    def declared_shape(self, name: str, parts: PartHeaders) -> tuple[int, int]:  # noqa: D102
        layout = self._layout_of(name)
        per_word = 32 // layout.bits
        words, rows = parts.matrix("qweight", "I32", "U32")
        columns = words * per_word
        groups = group_count(layout.group, columns)
        parts.expect("scales", (groups, rows))
        parts.expect("qzeros", (groups, -(-rows // per_word)), "I32", "U32")
        if "g_idx" in parts:
            parts.expect("g_idx", (columns,), "I32", "I64")
        elif layout.act_order:
            raise ValueError(f"desc_act is true, and {name}.g_idx is missing: a file is missing or damaged")
        return rows, columns

    def decode(self, name: str, parts: Mapping[str, Tensor]) -> IntegerWeight:  # noqa: D102
        layout = self._layout_of(name)
        bits, group = layout.bits, layout.group
        middle = 1 << (bits - 1)
        q = centered(unpack(parts["qweight"], bits, 0), bits).t().contiguous()
        zeros = unpack(parts["qzeros"], bits, 1).t()[: q.shape[0]]
        if self._version == 1:
            zeros = (zeros + 1) & (2 * middle - 1)
        exact = layout.symmetric and bool((zeros == middle).all())
        if layout.symmetric and not exact and bool((zeros == zeros[0, 0]).all()):
            raise ValueError(
                f"sym is true and all zero points are {int(zeros[0, 0])}, where {middle} is expected: "
                "checkpoint_format or sym is another one (gptq stores zero points minus 1, gptq_v2 does not)"
            )
        centered_zeros = None if exact else zeros.to(torch.int16) - middle
        permutation = None
        if "g_idx" in parts:
            permutation = group_permutation(parts["g_idx"], q.shape[1], group)
            q = q if permutation is None else q.index_select(1, permutation)
        weight = integer_weight(
            q, parts["scales"].t(), centered_zeros, group, self.requantizer, permutation, bits
        )
        if layout.act_order and _EXPERT.search(name):
            return self.requantizer.requantize(weight.dequantize(), INT8_SCHEME, "experts with desc_act")
        return weight


def read(source: str, config: PreTrainedConfig, settings: dict[str, Any]) -> ThirdPartyCheckpoint:
    """Opens a checkpoint that AutoGPTQ or GPTQModel wrote.

    Raises:
        ValueError: the weights do not have 4 or 8 bits, or the layout is another one.
    """
    form = str(settings.get("checkpoint_format", "gptq")).lower()
    if form not in ("gptq", "gptq_v2"):
        raise ValueError(f"checkpoint_format {form!r}: gptq and gptq_v2 can be read")
    reader = GptqReader(settings, 2 if form == "gptq_v2" else 1)
    return read_folder(source, config, "gptq", reader)
