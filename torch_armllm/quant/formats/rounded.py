"""Weights of types that no scheme holds: rounded once more, and what that costs noted."""

from __future__ import annotations

from torch import Tensor

from torch_armllm.quant.formats.weights import Integers, stacked
from torch_armllm.quant.schemes import scheme_named


class Rounded:
    """Rounds decoded weights, and keeps the errors for the report.

    Attributes:
        notes: a line for each type and scheme, up to date.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._errors: dict[tuple[str, str], list[float]] = {}

    def round(self, weight: Tensor, scheme: str, kind: str) -> Integers:
        """Rounds a float matrix (N, K), or experts' (E, N, K), of a type named ``kind``."""
        if weight.dim() == 3:
            return stacked([self.round(expert, scheme, kind) for expert in weight])
        found, error = scheme_named(scheme).quantize(weight)
        self._errors.setdefault((kind, scheme), []).append(error)
        self.notes[:] = [
            f"{len(errors)} matrices of {type_} were rounded to {name}: relative error "
            f"{sum(errors) / len(errors):.4f} on average, {max(errors):.4f} at most"
            for (type_, name), errors in self._errors.items()
        ]
        return Integers(found)
