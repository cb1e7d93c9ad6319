"""Names of dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SHORT_NAMES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
}


def dtype_name(dtype: torch.dtype) -> str:
    """Returns a dtype's name without the module, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def full_dtype_name(name: str) -> str:
    """Returns the full name of a dtype's short one, such as ``bfloat16`` for ``bf16``; others as they are."""
    return _SHORT_NAMES.get(name, name)


def float_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """Returns the dtype of a name, short or full; ``auto`` and dtypes as they are.

    Raises:
        ValueError: there is no such dtype of floats.
    """
    if not isinstance(dtype, str) or dtype == "auto":
        return dtype
    import torch

    found = getattr(torch, full_dtype_name(dtype), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype must be auto, bfloat16, float16 or float32, not {dtype!r}")
    return found
