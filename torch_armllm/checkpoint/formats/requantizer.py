"""Rounding to one of our schemes of weights whose format no scheme holds exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from torch_armllm.checkpoint.formats.integer_weight import IntegerWeight
from torch_armllm.quant.schemes.registry import scheme_named


class Requantizer:
    """Rounds dequantized weights, and collects the errors for the report."""

    def __init__(self) -> None:
        self._errors: dict[tuple[str, str], list[float]] = {}

    def requantize(self, weight: Tensor, scheme: str, kind: str) -> IntegerWeight:
        """Rounds a float matrix (N, K); ``kind`` names its original format in the report."""
        return self.requantize_rows(lambda rows: weight[rows], weight.shape, scheme, kind)

    def requantize_rows(
        self, read: Callable[[slice], Tensor], shape: Sequence[int], scheme: str, kind: str
    ) -> IntegerWeight:
        """Rounds a matrix on several threads; ``read`` returns some of its rows."""
        quantized, error = scheme_named(scheme).quantize_parts(read, shape)
        self._errors.setdefault((kind, scheme), []).append(error)
        return IntegerWeight(quantized)

    @property
    def notes(self) -> list[str]:
        """A line for each original format and scheme."""
        return [
            f"{len(errors)} matrices of {type_} were rounded to {name}: relative error "
            f"{sum(errors) / len(errors):.4f} on average, {max(errors):.4f} at most"
            for (type_, name), errors in self._errors.items()
        ]
