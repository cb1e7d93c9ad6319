"""GPTQ's layouts, versions 1 and 2: ``w = s · (q − z)`` with the inputs of eight columns in an int32."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from torch_armllm.checkpoint.formats.base import Foreign
from torch_armllm.checkpoint.formats.bit_unpacking import WIDE, by_groups, centered, integers, unpack
from torch_armllm.checkpoint.formats.integer_weight import Integers
from torch_armllm.checkpoint.formats.tensor_files import Packing, read_folder

_EXPERT = re.compile(r"\.experts\.\d+\.")


class Gptq(Packing):
    """``qweight`` int32 (K/8, N), ``qzeros`` int32 (S, N/8), ``scales`` (S, N) and ``g_idx`` int32 (K,).

    Version 1 stores ``z − 1``, in as many bits as the weights have.  ``g_idx`` names the group of each input;
    where it is not monotone (``desc_act``), columns are brought into the order of their groups.  Experts
    have orders of their own and share their inputs: they are rounded once more instead.
    """

    marker = "qweight"
    parts = ("qzeros", "scales", "g_idx")

    def __init__(self, bits: int, group: int, symmetric: bool, version: int, ordered: bool) -> None:
        super().__init__()
        self._bits, self._group, self._symmetric, self._version = bits, group, symmetric, version
        self._ordered = ordered and group > 0

    def decode(self, name: str, parts: Mapping[str, Tensor]) -> Integers:  # noqa: D102
        middle = 1 << (self._bits - 1)
        q = centered(unpack(parts["qweight"], self._bits, 0), self._bits).t().contiguous()
        zeros = unpack(parts["qzeros"], self._bits, 1).t()[: q.shape[0]]
        if self._version == 1:
            zeros = (zeros + 1) & (2 * middle - 1)
        exact = self._symmetric and bool((zeros == middle).all())
        moved = None if exact else zeros.to(torch.int16) - middle
        order = None
        if "g_idx" in parts:
            order = by_groups(parts["g_idx"], q.shape[1], self._group)
            q = q if order is None else q.index_select(1, order)
        found = integers(q, parts["scales"].t(), moved, self._group, self.rounded, order, self._bits)
        if self._ordered and _EXPERT.search(name):
            return self.rounded.round(found.dequantize(), WIDE, "experts with desc_act")
        return found


def read(place: str, config: PreTrainedConfig, settings: dict[str, Any]) -> Foreign:
    """Opens a folder that AutoGPTQ or GPTQModel wrote.

    Raises:
        ValueError: it is not of 4 or 8 bits, or of another layout.
    """
    bits = settings.get("bits")
    if bits not in (4, 8):
        raise ValueError(f"weights of {bits} bits: GPTQ of 4 and 8 bits can be read")
    form = str(settings.get("checkpoint_format", "gptq")).lower()
    if form not in ("gptq", "gptq_v2"):
        raise ValueError(f"checkpoint_format {form!r}: gptq and gptq_v2 can be read")
    packing = Gptq(
        int(bits),
        int(settings.get("group_size", 128)),
        bool(settings.get("sym", True)),
        2 if form == "gptq_v2" else 1,
        bool(settings.get("desc_act")) and not settings.get("static_groups"),
    )
    return read_folder(place, config, "gptq", packing)
