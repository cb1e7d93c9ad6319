"""Roundings without calibration: scales from the largest values, or searched by squared error."""

from __future__ import annotations

from torch import Tensor

from torch_armllm.quant.schemes.base import Quantized, Rounding, Scheme


class Peak(Rounding):
    """Scales from the largest values, so that nothing is clipped; values are rounded to nearest."""

    def rows(self, weight: Tensor, scheme: Scheme) -> Quantized:  # noqa: D102
        return scheme.round_rows(weight, search=False)


class Search(Rounding):
    """Scales with the least squared error, weighted by ``importance`` (K,) if given."""

    def __init__(self, importance: Tensor | None = None) -> None:
        self._importance = importance

    def rows(self, weight: Tensor, scheme: Scheme) -> Quantized:  # noqa: D102
        return scheme.round_rows(weight, self._importance)
