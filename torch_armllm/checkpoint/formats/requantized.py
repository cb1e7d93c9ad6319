"""Weights of types that no scheme holds: rounded once more, and what that costs noted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from torch_armllm.checkpoint.formats.integer_weight import Integers
from torch_armllm.quant.schemes.registry import scheme_named


class Rounded:
    """Rounds decoded weights, and keeps the errors for the report."""

    def __init__(self) -> None:
        self._errors: dict[tuple[str, str], list[float]] = {}

    def round(self, weight: Tensor, scheme: str, kind: str) -> Integers:
        """Rounds a float matrix (N, K) of a type named ``kind``."""
        return self.round_parts(lambda rows: weight[rows], weight.shape, scheme, kind)

    def round_parts(
        self, read: Callable[[slice], Tensor], shape: Sequence[int], scheme: str, kind: str
    ) -> Integers:
        """Rounds a matrix of which ``read`` gives some rows at a time, on several threads."""
        found, error = scheme_named(scheme).quantize_parts(read, shape)
        self._errors.setdefault((kind, scheme), []).append(error)
        return Integers(found)

    @property
    def notes(self) -> list[str]:
        """A line for each type and scheme."""
        return [
            f"{len(errors)} matrices of {type_} were rounded to {name}: relative error "
            f"{sum(errors) / len(errors):.4f} on average, {max(errors):.4f} at most"
            for (type_, name), errors in self._errors.items()
        ]
