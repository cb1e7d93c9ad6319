"""Coordinate descent after GPTQ: re-optimizes each group of columns with all others fixed.

Each visit minimizes the error tr((W − Ŵ) H (W − Ŵ)ᵀ) over the integers and the step of one group; a group
changes only if that lowers the error.  QuantEase (arXiv 2309.01885) does this with single weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.quant.methods.calibrated.error_feedback import round_with_feedback, unit_rows
from torch_armllm.quant.methods.calibrated.value_grid import Grid

_BLOCK = 128


class CoordinateDescent:
    """Coordinate descent over the quantized weights of some rows.

    Attributes:
        values: the current quantized weights, float32 (K, N).
    """

    def __init__(
        self, weight: Tensor, hessian: Tensor, values: Tensor, grid: Grid, coarse: Tensor | None = None
    ) -> None:
        """Starts from a GPTQ solution.

        Args:
            weight: W, float32 (K, N).
            hessian: H, float32 (K, K), positive definite.
            values: Ŵ, float32 (K, N).
            grid: the grid that Ŵ lies on.
            coarse: H in a cheaper dtype, for row scales: they are sums over all of H, which a coarse dtype
                hardly changes.
        """
        self._hessian, self._grid = hessian, grid
        self._coarse = hessian if coarse is None else coarse
        self._weight = weight
        self.values = values

    def refit_rows(self) -> None:
        """Sets every row scale to the one with the least error for its integers."""
        if self._grid.float_factors:
            return
        product = (self._coarse @ self.values.to(self._coarse.dtype)).float()
        size = (self.values * product).sum(0)
        change = (self._weight * product).sum(0) / torch.where(size > 0, size, torch.ones_like(size))
        change = torch.where((size > 0) & (change > 0), change, torch.ones_like(change))
        self._grid.row *= change
        self.values *= change

    def sweep(self, wider: bool = True) -> None:
        """Visits every group once; ``wider`` also searches the steps of the groups."""
        columns, span = len(self.values), self._grid.span
        block = max(_BLOCK, span)
        error = self._weight - self.values
        for begin in range(0, columns, block):
            end = min(begin + block, columns)
            residual = self._hessian[begin:end] @ error
            for first in range(begin, end, span):
                group = slice(first, min(first + span, columns))
                change = self._visit(group, residual[group.start - begin : group.stop - begin], wider)
                residual.addmm_(self._hessian[begin:end, group], change, alpha=-1)
                error[group] -= change

    def _visit(self, group: slice, residual: Tensor, wider: bool) -> Tensor:
        """Moves a group to its least error, and returns the change (n, N)."""
        grid, current = self._grid, self.values[group]
        inner = self._hessian[group, group]
        # rounding runs from the last column to the first: the most important one comes last
        permutation = inner.diagonal().argsort()
        upper = torch.linalg.cholesky(inner[permutation][:, permutation], upper=True)
        target = (current + torch.cholesky_solve(residual, torch.linalg.cholesky(inner)))[permutation]
        index = group.start // grid.span
        factor = grid.factor[index]
        factors = self._factors(index, current, target[permutation.argsort()], inner) if wider else [factor]
        zeros, factors = self._zeros(index, factors, wider)
        low, high = (grid.low - torch.cat(zeros), grid.high - torch.cat(zeros))
        step = (torch.stack(factors) * grid.row).flatten().expand(len(target), -1)
        targets = target.repeat(1, len(factors))
        values = round_with_feedback(
            targets, unit_rows(upper), step, low.expand(len(target), -1), high.expand(len(target), -1)
        )
        # the current values win ties
        values = torch.cat([current[permutation], values], dim=1)
        errors = (upper @ (values - target.repeat(1, len(factors) + 1))).square().sum(0)
        best = errors.view(len(factors) + 1, -1).argmin(0)[None]
        grid.factor[index] = torch.stack([factor, *factors]).gather(0, best)[0]
        if grid.zero is not None and grid.zero_range:
            grid.zero[index] = torch.stack([grid.zero[index], *zeros]).gather(0, best)[0]
        selected = values.view(len(target), len(factors) + 1, -1).gather(1, best.expand(len(target), 1, -1))[
            :, 0
        ]
        updated = torch.empty_like(current)
        updated[permutation] = selected
        change = updated - current
        self.values[group] = updated
        return change

    def _zeros(self, index: int, factors: list[Tensor], wider: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the candidate zero points of a group and the step of each."""
        grid = self._grid
        zero = torch.zeros_like(grid.row) if grid.zero is None else grid.zero[index]
        zeros = [zero] * len(factors)
        if not wider or grid.zero_range is None:
            return zeros, factors
        near = [(zero + step).clamp(*grid.zero_range) for step in (1, -1)]
        return zeros + near, factors + [grid.factor[index]] * len(near)

    def _factors(self, index: int, current: Tensor, target: Tensor, inner: Tensor) -> list[Tensor]:
        """Returns the candidate steps of a group."""
        grid, factor = self._grid, self._grid.factor[index]
        if grid.whole_factors:
            near = [factor, grid.round_factor(factor + 1), grid.round_factor(factor - 1)]
            return [*near, -factor] if grid.signed_factors else near
        if not grid.float_factors:
            return [factor]
        product = inner @ current
        size = (current * product).sum(0)
        fitted = factor * (target * product).sum(0) / torch.where(size > 0, size, torch.ones_like(size))
        fitted = torch.where((size > 0) & (fitted * factor > 0), fitted, factor)
        return [
            factor,
            grid.round_factor(fitted),
            grid.round_factor(fitted * 0.95),
            grid.round_factor(fitted * 1.05),
        ]
