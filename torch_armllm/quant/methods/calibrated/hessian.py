"""What reaches a layer, summed up: the second moments of its inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.quant.methods.calibrated.gptq_solver import factor

_WIDE = 1024
"""Columns whose moments with all that follow are summed up at once."""
_TRUST = 0.5
DAMPING = 0.01
"""Of the mean diagonal, added to it: texts for calibration do not show everything that can come."""


class Hessian:
    """Σ x xᵀ over inputs x, and by how many; and Σ x (y − x)ᵀ, if y should have come in the place of x.

    Attributes:
        total: float32 (K, K); what is below its diagonal does not count.
        lost: float32 (K, K), or None where nothing is known of what should have come.
        count: of inputs.
    """

    def __init__(self, columns: int) -> None:
        self.total = torch.zeros(columns, columns)
        self.lost: Tensor | None = None
        self.count = 0

    def add(self, x: Tensor, weight: Tensor | None = None, wanted: Tensor | None = None) -> None:
        """Adds rows (…, K) of any float type.

        Args:
            x: what reached the layer.
            weight: (…,), what each row counts; 1 by default.
            wanted: (…, K), what reaches it in the float model.
        """
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        other = rows if weight is None else rows * weight.reshape(-1, 1)
        for begin in range(0, rows.shape[1], _WIDE):  # the upper triangle; `moment` gives the other half
            part = slice(begin, begin + _WIDE)
            self.total[part, begin:].addmm_(rows[:, part].t(), other[:, begin:])
        if wanted is not None:
            if self.lost is None:
                self.lost = torch.zeros_like(self.total)
            self.lost.addmm_(rows.t(), wanted.detach().reshape(rows.shape).float() - rows)
        self.count += len(rows)

    def mean(self) -> Tensor:
        """The mean of x xᵀ: float32 (K, K)."""
        upper = self.total.triu() / max(self.count, 1)
        return upper + upper.triu(1).t()

    def damped(self, damping: float = DAMPING) -> Tensor:
        """Half the second derivative of a row's squared output error, scaled and made positive definite.

        Columns that nothing reached get the damping alone, and are rounded to nearest.

        Raises:
            ValueError: an input was not finite.
        """
        found = self.mean()
        size = float(found.diagonal().mean())
        if not size < float("inf"):
            raise ValueError("calibration brought NaN or infinite inputs: the model computes nonsense")
        size = size or 1.0
        found.diagonal().add_(damping * size)
        return found / size

    def correction(self, damping: float = DAMPING) -> Tensor | None:
        """What a weight is to be changed by, W ← W + W·Cᵀ, to give on x what it gave on y: (K, K), or None.

        Half of the least squares of GPTAQ (arXiv 2504.02692), C = (Σ x xᵀ)⁻¹ Σ x (y − x)ᵀ: in other texts
        the whole of it would not hold.
        """
        if self.lost is None:
            return None
        moment = self.mean()
        moment.diagonal().add_(damping * (float(moment.diagonal().mean()) or 1.0))
        lost = self.lost * (_TRUST / max(self.count, 1))
        return torch.cholesky_solve(lost, factor(moment), upper=True)
