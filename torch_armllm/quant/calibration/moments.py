"""What reaches a layer, summed up: the second moments of its inputs."""

from __future__ import annotations

import torch
from torch import Tensor

DAMPING = 0.01
"""Of the mean diagonal, added to it: texts for calibration do not show everything that can come."""


class Moments:
    """Σ x xᵀ over inputs x, and by how many.

    Attributes:
        total: float32 (K, K).
        count: of inputs.
    """

    def __init__(self, columns: int) -> None:
        self.total = torch.zeros(columns, columns)
        self.count = 0

    def add(self, x: Tensor, weight: Tensor | None = None) -> None:
        """Adds rows (…, K) of any float type, each counted by ``weight`` (…,), where it is given."""
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        other = rows if weight is None else rows * weight.reshape(-1, 1)
        self.total.addmm_(rows.t(), other)
        self.count += len(rows)

    def hessian(self, damping: float = DAMPING) -> Tensor:
        """Half the second derivative of a row's squared output error, scaled and made positive definite.

        Columns that nothing reached get the damping alone, and are rounded to nearest.

        Raises:
            ValueError: an input was not finite.
        """
        found = self.total / max(self.count, 1)
        size = float(found.diagonal().mean())
        if not size < float("inf"):
            raise ValueError("calibration brought NaN or infinite inputs: the model computes nonsense")
        size = size or 1.0
        found.diagonal().add_(damping * size)
        return found / size
