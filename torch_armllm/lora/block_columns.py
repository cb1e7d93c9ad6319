"""Some columns of second factors, in whole blocks: the integers of one have a scale."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from torch_armllm.ops.lora import BLOCK

Columns: TypeAlias = tuple[tuple[int, int], ...]
"""Begin and end of each range."""


def are_blocks(columns: Columns) -> bool:
    """True if columns are whole blocks; the last one may end with the layer."""
    ends = [end for _, end in columns[:-1]]
    return not any(bound % BLOCK for bound in (*ends, *(begin for begin, _ in columns)))


def empty_columns(b: Tensor, columns: Columns) -> Tensor:
    """Returns zeros for some columns of the second factors ``(slots, ⌈N / 64⌉, R, …)`` of a layer."""
    slots, _, *block = b.shape
    size = sum(end - begin for begin, end in columns)
    return torch.zeros(slots, -(-size // BLOCK), *block, dtype=b.dtype)


def columns_of(b: Tensor, columns: Columns) -> Tensor:
    """Returns some columns of an adapter's second factors ``(⌈N / 64⌉, r, …)``, in the same layout."""
    assert are_blocks(columns), "a block would be cut"
    return torch.cat([b[begin // BLOCK : -(-end // BLOCK)] for begin, end in columns])
