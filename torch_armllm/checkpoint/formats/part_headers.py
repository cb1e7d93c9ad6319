"""Checks of the tensors of one quantized module against one another, by their headers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch_armllm.checkpoint.tensor_headers import FLOATS, TensorHeader

_FEW = 1 << 16
"""Values of the largest tensor that is read to check others."""


class PartHeaders:
    """The headers of a module's tensors, by the last part of their names.

    Tensors of all experts of a layer have a leading expert axis, which the sizes here do not count;
    one-dimensional integers describe all experts at once.

    Attributes:
        experts: the size of the expert axis; None if there is none.
    """

    def __init__(
        self,
        module: str,
        parts: Mapping[str, TensorHeader],
        tensors: Mapping[str, Any],
        separator: str = ".",
    ) -> None:
        """Raises ValueError if the tensors have different numbers of experts."""
        self._module, self._parts, self._tensors = f"{module}{separator}", parts, tensors
        joined = any(len(header.shape) > 2 for header in parts.values())
        self.experts: int | None = None
        for part, header in parts.items():
            if joined and not self._is_shared(header):
                if self.experts not in (None, header.shape[0] if header.shape else None):
                    raise ValueError(
                        f"{self._place(part)} has the shape {header.shape}, and {self.experts} experts are "
                        "expected"
                    )
                self.experts = header.shape[0]

    def __contains__(self, part: str) -> bool:
        return part in self._parts

    def matrix(self, part: str, *dtypes: str) -> tuple[int, int]:
        """Returns the sizes of a matrix.

        Raises:
            ValueError: the tensor is missing, no matrix, or of none of the ``dtypes``.
        """
        shape = self.shape(part, *dtypes)
        if len(shape) != 2:
            raise ValueError(f"{self._place(part)} has the shape {shape}, and a matrix is expected")
        return shape[0], shape[1]

    def shape(self, part: str, *dtypes: str) -> tuple[int, ...]:
        """Returns the sizes of a tensor; see `matrix`."""
        if part not in self._parts:
            raise ValueError(f"{self._module}{part} is missing: a file is missing or damaged")
        header = self._parts[part]
        if header.dtype not in (dtypes or FLOATS):
            raise ValueError(
                f"{self._place(part)} is {header.dtype}, and {' or '.join(dtypes or FLOATS)} is expected"
            )
        return header.shape if self.experts is None or self._is_shared(header) else header.shape[1:]

    def expect(self, part: str, shape: Sequence[int], *dtypes: str) -> None:
        """Raises ValueError unless a tensor has the shape, and one of the ``dtypes``, or is a float."""
        found = self.shape(part, *dtypes)
        if found != tuple(shape):
            raise ValueError(f"{self._place(part)} has the shape {found}, and {tuple(shape)} is expected")

    def is_of(self, part: str, dtype: str) -> bool:
        """True if a tensor has a dtype."""
        return self._parts[part].dtype == dtype

    def integers(self, part: str) -> list[int]:
        """Reads a tensor of a few integers; see `matrix` for the errors."""
        if math.prod(self.shape(part, "I32", "I64")) > _FEW:
            raise ValueError(f"{self._place(part)} has the shape {self._parts[part].shape}: it is damaged")
        values: list[int] = self._tensors[part][...].flatten().tolist()
        return values

    def _is_shared(self, header: TensorHeader) -> bool:
        return len(header.shape) == 1 and not header.is_float

    def _place(self, part: str) -> str:
        return f"{self._module}{part} in {self._parts[part].file}"
