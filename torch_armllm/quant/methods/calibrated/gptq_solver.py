"""GPTQ and what follows it, for the rows of one matrix."""

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
"""Columns of rows that are swept so often; longer ones once: a second time gains little and takes long."""
_TRIES = 4
_CHUNK = 1 << 23
"""Weights rounded at once at most: their temporaries are some eight times as many floats.  With fewer rows,
threads would spend their time on the interpreter's lock: every step is an op on one column of them."""


class GptqRounding(Rounding):
    """Integers by GPTQ in the order of activation, then by coordinate descent, steps and all.

    The steps come from the usual search, errors counted by the diagonal of H; the columns that carry most are
    rounded first, so that the others can make up for them.  What then lies on the grid is improved group by
    group.
    """

    def __init__(
        self, hessian: Tensor, rows: int, sweeps: int | None = None, correction: Tensor | None = None
    ) -> None:
        """Takes H, float32 (K, K), positive definite, and how many rows the matrix has.

        ``correction`` is what `Hessian.correction` gives.
        """
        usual = SWEEPS if len(hessian) <= _SHORT else 1
        self._sweeps = usual if sweeps is None else sweeps
        self._hessian, self._correction = hessian, correction
        self._order = hessian.diagonal().argsort()
        self._upper = unit_rows(factor(hessian[self._order][:, self._order]))
        self._coarse = hessian.to(fast_matmul_dtype())
        share = -(-rows // torch.get_num_threads())
        self.chunk = min(_CHUNK, len(hessian) * -(-share // 16) * 16)

    def rows(self, weight: Tensor, scheme: Scheme) -> Quantized:  # noqa: D102
        energy = self._hessian.diagonal()
        if self._correction is not None:
            weight = weight + weight @ self._correction.t()
        grid = grid_of(scheme.round_rows(weight, energy / energy.mean()))
        target = weight.t().contiguous()
        order = self._order
        low, high = grid.bounds(order)
        values = torch.empty_like(target)
        values[order] = round_with_feedback(target[order], self._upper, grid.steps(order), low, high)
        descent = CoordinateDescent(target, self._hessian, values, grid, self._coarse)
        for _ in range(self._sweeps):
            descent.refit_rows()
            descent.sweep()
        descent.refit_rows()
        return grid.stored(descent.values)


def factor(hessian: Tensor) -> Tensor:
    """The upper Cholesky factor of a matrix, damped more where rounding made it indefinite."""
    for step in range(_TRIES):
        upper: Tensor
        upper, failed = torch.linalg.cholesky_ex(hessian, upper=True)
        if not int(failed):
            return upper
        hessian = hessian + torch.eye(len(hessian)) * (10.0**step * 1e-2 * hessian.diagonal().mean())
    raise ValueError("the inputs of a layer depend on each other so much that they cannot be calibrated with")
