"""The GPTQ solver of one matrix: error feedback, then coordinate descent."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.quant.methods.calibrated.coordinate_descent import CoordinateDescent
from torch_armllm.quant.methods.calibrated.error_feedback import round_with_feedback, unit_rows
from torch_armllm.quant.methods.calibrated.matmul_dtype import fast_matmul_dtype
from torch_armllm.quant.methods.calibrated.value_grid import grid_of
from torch_armllm.quant.schemes.base import Quantized, Rounding, Scheme

SWEEPS = 2
_SHORT = 1536
"""Most columns for `SWEEPS` sweeps; wider matrices get one: a second gains little and takes long."""
_TRIES = 4
_FARTHEST = 0.1
"""Most that a correction moves a row, as a part of its norm: about what INT4 rounds.  Larger ones are fitted
to a few loud channels, and do not hold on other texts."""
_CHUNK = 1 << 23
"""Most weights rounded together: temporaries are about eight times as many floats.  Each step is an op on one
column, so with fewer rows the threads would contend for the interpreter's lock."""


class GptqRounding(Rounding):
    """Rounds by GPTQ in activation order, then improves integers and steps by coordinate descent.

    The steps come from the usual search, with errors weighted by the diagonal of H.  The columns with the
    largest inputs are rounded first, so that the remaining columns can compensate their errors.
    """

    def __init__(
        self, hessian: Tensor, rows: int, sweeps: int | None = None, correction: Tensor | None = None
    ) -> None:
        """Factors the Hessian.

        Args:
            hessian: float32 (K, K), positive definite.
            rows: number of rows of the matrix.
            sweeps: sweeps of coordinate descent; None chooses by the number of columns.
            correction: see `Hessian.correction`.
        """
        usual = SWEEPS if len(hessian) <= _SHORT else 1
        self._sweeps = usual if sweeps is None else sweeps
        self._hessian, self._correction = hessian, correction
        self._permutation = hessian.diagonal().argsort()
        self._upper = unit_rows(factor(hessian[self._permutation][:, self._permutation]))
        self._coarse = hessian.to(fast_matmul_dtype())
        share = -(-rows // torch.get_num_threads())
        self.chunk = min(_CHUNK, len(hessian) * -(-share // 16) * 16)

    def rows(self, weight: Tensor, scheme: Scheme) -> Quantized:  # noqa: D102
        energy = self._hessian.diagonal()
        if self._correction is not None:
            weight = _moved(weight, weight @ self._correction.t())
        grid = grid_of(scheme.round_rows(weight, energy / energy.mean()))
        target = weight.t().contiguous()
        permutation = self._permutation
        low, high = grid.bounds(permutation)
        values = torch.empty_like(target)
        values[permutation] = round_with_feedback(
            target[permutation], self._upper, grid.steps(permutation), low, high
        )
        descent = CoordinateDescent(target, self._hessian, values, grid, self._coarse)
        for _ in range(self._sweeps):
            descent.refit_rows()
            descent.sweep()
        descent.refit_rows()
        return grid.stored(descent.values)


def _moved(weight: Tensor, by: Tensor) -> Tensor:
    """Returns the rows (r, K) moved ``by`` (r, K), a row by at most `_FARTHEST` of its norm."""
    far: Tensor = by.norm(dim=1, keepdim=True) / (_FARTHEST * weight.norm(dim=1, keepdim=True))
    return weight + by / far.nan_to_num(1.0).clamp_min_(1.0)


def factor(hessian: Tensor) -> Tensor:
    """Returns the upper Cholesky factor, with more damping if rounding made the matrix indefinite."""
    for step in range(_TRIES):
        upper: Tensor
        upper, failed = torch.linalg.cholesky_ex(hessian, upper=True)
        if not int(failed):
            return upper
        hessian = hessian + torch.eye(len(hessian)) * (10.0**step * 1e-2 * hessian.diagonal().mean())
    raise ValueError(
        "the Hessian of a layer is not positive definite even when damped: calibrate with more tokens"
    )
