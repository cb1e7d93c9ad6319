"""Coordinate descent behind GPTQ: every group of columns anew, given all the others, until little is gained.

Block by block the error tr((W − Ŵ) H (W − Ŵ)ᵀ) is minimized over the integers of a group and its step; a
group is changed only where that lowers the error.  QuantEase (arXiv 2309.01885) moves single weights so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.quant.methods.calibrated.error_feedback import round_with_feedback, unit_rows
from torch_armllm.quant.methods.calibrated.value_grid import Grid

_BLOCK = 128


class CoordinateDescent:
    """The weights of some rows, on their way.

    Attributes:
        values: float32 (K, N), where the weights are now.
    """

    def __init__(
        self, weight: Tensor, hessian: Tensor, values: Tensor, grid: Grid, coarse: Tensor | None = None
    ) -> None:
        """Takes W and Ŵ as (K, N), and H as float32 (K, K), positive definite.

        ``coarse`` is H in the type in which the scales of rows are computed: by sums over all of it, which a
        coarse type hardly changes.
        """
        self._hessian, self._grid = hessian, grid
        self._coarse = hessian if coarse is None else coarse
        self._weight = weight
        self.values = values

    def refit_rows(self) -> None:
        """Gives every row the scale with the least error for its integers."""
        if self._grid.float_factors:
            return
        pulled = (self._coarse @ self.values.to(self._coarse.dtype)).float()
        size = (self.values * pulled).sum(0)
        change = (self._weight * pulled).sum(0) / torch.where(size > 0, size, torch.ones_like(size))
        change = torch.where((size > 0) & (change > 0), change, torch.ones_like(change))
        self._grid.row *= change
        self.values *= change

    def sweep(self, wider: bool = True) -> None:
        """Visits every group once; ``wider`` looks for better steps too."""
        columns, span = len(self.values), self._grid.span
        block = max(_BLOCK, span)
        away = self._weight - self.values
        for begin in range(0, columns, block):
            end = min(begin + block, columns)
            left = self._hessian[begin:end] @ away
            for first in range(begin, end, span):
                group = slice(first, min(first + span, columns))
                change = self._visit(group, left[group.start - begin : group.stop - begin], wider)
                left.addmm_(self._hessian[begin:end, group], change, alpha=-1)
                away[group] -= change

    def _visit(self, group: slice, left: Tensor, wider: bool) -> Tensor:
        """Moves a group to where the error is least, and returns by how much (n, N)."""
        grid, now = self._grid, self.values[group]
        inner = self._hessian[group, group]
        order = inner.diagonal().argsort()  # what counts most is rounded first, from the last
        upper = torch.linalg.cholesky(inner[order][:, order], upper=True)
        target = (now + torch.cholesky_solve(left, torch.linalg.cholesky(inner)))[order]
        index = group.start // grid.span
        factor = grid.factor[index]
        tried = self._factors(index, now, target[order.argsort()], inner) if wider else [factor]
        columns = torch.arange(group.start, group.stop)[order]
        low, high = (
            bound.repeat(1, len(tried)) if bound.shape[1] > 1 else bound for bound in grid.bounds(columns)
        )
        step = (torch.stack(tried) * grid.row).flatten().expand(len(columns), -1)
        targets = target.repeat(1, len(tried))
        values = round_with_feedback(targets, unit_rows(upper), step, low, high)
        # what is there stays unless another is better
        values = torch.cat([now[order], values], dim=1)
        errors = (upper @ (values - target.repeat(1, len(tried) + 1))).square().sum(0)
        best = errors.view(len(tried) + 1, -1).argmin(0)
        grid.factor[index] = torch.stack([factor, *tried]).gather(0, best[None])[0]
        picked = values.view(len(columns), len(tried) + 1, -1).gather(1, best.expand(len(columns), 1, -1))[
            :, 0
        ]
        found = torch.empty_like(now)
        found[order] = picked
        change = found - now
        self.values[group] = found
        return change

    def _factors(self, index: int, now: Tensor, target: Tensor, inner: Tensor) -> list[Tensor]:
        """Steps to try for a group."""
        grid, factor = self._grid, self._grid.factor[index]
        if grid.whole_factors:
            return [factor, grid.kept(factor + 1), grid.kept(factor - 1)]
        if not grid.float_factors:
            return [factor]
        pulled = inner @ now
        size = (now * pulled).sum(0)
        fitted = factor * (target * pulled).sum(0) / torch.where(size > 0, size, torch.ones_like(size))
        fitted = torch.where((size > 0) & (fitted * factor > 0), fitted, factor)
        return [factor, grid.kept(fitted), grid.kept(fitted * 0.95), grid.kept(fitted * 1.05)]
