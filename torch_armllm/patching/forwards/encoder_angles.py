"""Angles by which the layers of an encoder rotate: as they are given them, and as a plan reads them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

PLACES = "position_ids"
"""Argument with the row and column of each patch, -1 for padding."""
_PAIR, _COMPLEX = "position_embeddings", "freqs_ci"


class AnglesForm(ABC):
    """Form in which layers are given an angle for each pair of a head's elements."""

    @abstractmethod
    def of_checks(self, angles: Tensor, dtype: torch.dtype) -> dict[str, Any]:
        """Returns arguments of a layer.

        Args:
            angles: ``(1, T, pairs)``.
            dtype: of the layers.
        """

    @abstractmethod
    def read(self, named: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines ``(rows, pairs)`` of arguments of a layer."""


class _Halves(AnglesForm):
    """Cosines and sines of whole heads, whose first half forms pairs with the second."""

    def of_checks(self, angles: Tensor, dtype: torch.dtype) -> dict[str, Any]:
        twice = torch.cat([angles, angles], -1)
        return {_PAIR: (twice.cos().to(dtype), twice.sin().to(dtype))}

    def read(self, named: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        cos, sin = (t.flatten(0, -2)[:, : t.shape[-1] // 2] for t in named[_PAIR])
        return cos, sin


class _Axial(AnglesForm):
    """Cosines and sines of whole heads, of which one half turns by rows and the other by columns."""

    def of_checks(self, angles: Tensor, dtype: torch.dtype) -> dict[str, Any]:
        rows, columns = angles.chunk(2, -1)
        whole = torch.cat([rows, rows, columns, columns], -1)
        places = torch.zeros_like(angles[..., :2], dtype=torch.int64)
        return {_PAIR: (whole.cos().to(dtype), whole.sin().to(dtype)), PLACES: places}

    def read(self, named: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        cos, sin = (t.flatten(0, -2).unflatten(-1, (2, 2, -1))[:, :, 0].flatten(1) for t in named[_PAIR])
        return cos, sin


class _Complex(AnglesForm):
    """Complex numbers ``(T, 1, pairs)`` by which adjacent elements of a head are multiplied."""

    def of_checks(self, angles: Tensor, dtype: torch.dtype) -> dict[str, Any]:
        return {_COMPLEX: torch.complex(angles.cos(), angles.sin()).transpose(0, 1)}

    def read(self, named: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        numbers = named[_COMPLEX].flatten(0, -2)
        return numbers.real, numbers.imag


ANGLES = frozenset({_PAIR, _COMPLEX})
"""Names of the arguments that hold angles."""


def angles_form(names: set[str]) -> AnglesForm | None:
    """Returns the form of the angles that layers take; None if they take none.

    Args:
        names: of their arguments.
    """
    if _COMPLEX in names:
        return _Complex()
    if _PAIR in names:
        return _Axial() if PLACES in names else _Halves()
    return None
