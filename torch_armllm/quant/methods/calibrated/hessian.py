"""The Hessian of a layer's output error: the second moments of its inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.quant.methods.calibrated.gptq_solver import factor

_WIDE = 1024
"""Columns of the upper triangle that are accumulated together."""
_TRUST = 0.75
"""Part of the least-squares correction that is applied if the inputs are many: see `Hessian.correction`."""
_DOUBT = 8.0
"""That part is divided by 1 + `_DOUBT` · columns / inputs: a correction fitted to few inputs is noise."""
DAMPING = 0.01
"""Fraction of the mean diagonal that is added to the diagonal, so that the matrix can be factored."""
_UNSEEN = 0.4
"""`Hessian.damping`: with less, the rounding is fitted to the calibration texts and loses on others."""
_FEW = 0.2
"""`Hessian.damping` is at least `_FEW` · columns / inputs: moments of few inputs are mostly noise."""


class Hessian:
    """Accumulates Σ x xᵀ over inputs x, and Σ x (y − x)ᵀ if the float model's inputs y are known.

    Attributes:
        total: Σ x xᵀ, float32 (K, K); only the upper triangle is valid.
        cross: Σ x (y − x)ᵀ, float32 (K, K), or None without float inputs.
        count: number of inputs.
    """

    def __init__(self, columns: int) -> None:
        self.total = torch.zeros(columns, columns)
        self.cross: Tensor | None = None
        self.count = 0

    def add(self, x: Tensor, weight: Tensor | None = None, float_inputs: Tensor | None = None) -> None:
        """Adds inputs (…, K) of any float type.

        Args:
            x: inputs of the layer.
            weight: (…,), the weight of each input; 1 by default.
            float_inputs: (…, K), the same inputs in the float model.
        """
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        other = rows if weight is None else rows * weight.reshape(-1, 1)
        for begin in range(0, rows.shape[1], _WIDE):  # the upper triangle; `mean` mirrors it
            part = slice(begin, begin + _WIDE)
            self.total[part, begin:].addmm_(rows[:, part].t(), other[:, begin:])
        if float_inputs is not None:
            if self.cross is None:
                self.cross = torch.zeros_like(self.total)
            self.cross.addmm_(rows.t(), float_inputs.detach().reshape(rows.shape).float() - rows)
        self.count += len(rows)

    def mean(self) -> Tensor:
        """Returns the mean of x xᵀ, float32 (K, K)."""
        upper = self.total.triu() / max(self.count, 1)
        return upper + upper.triu(1).t()

    @property
    def damping(self) -> float:
        """The damping for `damped` that suits the number of inputs: `_UNSEEN`, or more if they are few."""
        return max(_UNSEEN, _FEW * self._columns_per_input)

    @property
    def _columns_per_input(self) -> float:
        return len(self.total) / max(self.count, 1)

    def damped(self, damping: float = DAMPING) -> Tensor:
        """Returns half the second derivative of a row's squared output error, scaled and positive definite.

        A column without inputs has only the damping, so it is rounded to nearest.

        Args:
            damping: fraction of the mean diagonal that is added to the diagonal.

        Raises:
            ValueError: an input was not finite.
        """
        mean = self.mean()
        size = float(mean.diagonal().mean())
        if not size < float("inf"):
            raise ValueError(
                "the calibration inputs hold a NaN or an infinity: check the weights of the model"
            )
        size = size or 1.0
        mean.diagonal().add_(damping * size)
        return mean / size

    def correction(self) -> Tensor | None:
        """Returns C (K, K) of the correction W ← W + W·Cᵀ; None without float inputs.

        With it, the layer computes on its inputs x nearly what W computes on the float inputs y.  C is a part
        of the least-squares solution (Σ x xᵀ)⁻¹ Σ x (y − x)ᵀ of GPTAQ (arXiv 2504.02692): the whole
        correction does not hold on other texts.  The part is smaller if the inputs are few.
        """
        if self.cross is None:
            return None
        moment = self.mean()
        moment.diagonal().add_(self.damping * (float(moment.diagonal().mean()) or 1.0))
        trust = _TRUST / (1 + _DOUBT * self._columns_per_input)
        cross = self.cross * (trust / max(self.count, 1))
        return torch.cholesky_solve(cross, factor(moment), upper=True)
