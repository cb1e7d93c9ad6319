"""Names of dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def dtype_name(dtype: torch.dtype) -> str:
    """Returns a dtype's name without the module, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
