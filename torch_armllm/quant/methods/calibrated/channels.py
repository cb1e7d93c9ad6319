"""The channels that a module writes or reads, as slices of its weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from torch_armllm.hf.expert_layout import ExpertLayout, parameter

_CHECKED_TOGETHER = 1 << 22
_MOST_SCALED = 12
"""A weight is multiplied by at most two to this power: on trial, as a writer's and as a reader's."""


class _Part(NamedTuple):
    """A view of a weight whose last axis is that of the channels, and which of the channels they are."""

    view: Tensor
    channels: slice


@dataclass(frozen=True)
class Channels:
    """A module that writes channels, reads channels, or both.

    Attributes:
        module: a norm, a linear layer, a router with a weight (N, K), or experts.
        layout: the weight layout of experts; None for all others.
        inside: the channels are those between the up and down projections of each expert, expert after
            expert, which experts both write and read; otherwise experts read what each token carries.
    """

    module: nn.Module
    layout: ExpertLayout | None = None
    inside: bool = False

    @property
    def count_written(self) -> int:
        """Number of channels that the module writes."""
        return _count(self._written())

    @property
    def count_read(self) -> int:
        """Number of channels that the module reads."""
        return _count(self._read())

    def matrices(self) -> list[Tensor]:
        """Returns views (N, K) of the weights that read the channels."""
        return [part.view for part in self._read()]

    def multiply_written(self, factors: Tensor) -> None:
        """Multiplies the channels that the module writes by factors (written,)."""
        for part in self._written():
            _multiply(part.view, factors[part.channels])

    def multiply_read(self, factors: Tensor) -> None:
        """Multiplies the weights that read each channel by factors (read,)."""
        for part in self._read():
            _multiply(part.view, factors[part.channels])

    def exact_written(self, factors: Tensor) -> Tensor:
        """True for each channel that `multiply_written` multiplies exactly by a power of two."""
        return (
            torch.ones_like(factors, dtype=torch.bool) if self._ordinary else _exact(self._written(), factors)
        )

    def exact_read(self, factors: Tensor) -> Tensor:
        """True for each channel that `multiply_read` multiplies exactly by a power of two."""
        return _exact([] if self._ordinary else self._read(), factors)

    @cached_property
    def _ordinary(self) -> bool:
        """True if no weight is so small or so large that a few scalings could cost it bits.

        It is looked up before the first scaling, as reading all weights takes long.
        """
        return all(_far_from_limits(p.detach()) for p in self.module.parameters(recurse=False))

    def _written(self) -> list[_Part]:
        if self.layout is not None:
            assert self.inside, "experts write no channels but those inside"
            return _of_experts(_inner_views(self.module, self.layout))
        parameters = [p.detach() for p in self.module.parameters(recurse=False)]
        turned = [p if isinstance(self.module, Conv1D) or p.dim() == 1 else p.t() for p in parameters]
        return [_Part(view, slice(0, view.shape[-1])) for view in turned]

    def _read(self) -> list[_Part]:
        if self.layout is None:
            weight = parameter(self.module, "weight")
            views = [weight.t() if isinstance(self.module, Conv1D) else weight]
        elif self.inside:
            return _of_experts([self.layout.outer(parameter(self.module, self.layout.weights[1]))])
        else:
            parts = self.layout.inner(parameter(self.module, self.layout.weights[0]))
            views = [view for part in parts for view in part]
        return [_Part(view, slice(0, view.shape[-1])) for view in views]


def _multiply(view: Tensor, factors: Tensor) -> None:
    """Multiplies a weight in place; powers of two in its own dtype, which is much faster."""
    narrow = factors.to(view.dtype)
    view.mul_(narrow if torch.equal(narrow.to(factors.dtype), factors) else factors)


def _inner_views(module: nn.Module, layout: ExpertLayout) -> list[list[Tensor]]:
    """Returns views of each expert's up matrix (H, I), and of its bias (I,) if there is one."""
    views = [[up.t() for up in layout.inner(parameter(module, layout.weights[0]))[-1]]]
    if layout.biased:
        views.append(layout.up_biases(parameter(module, f"{layout.weights[0]}_bias")))
    return views


def _of_experts(views: list[list[Tensor]]) -> list[_Part]:
    return [
        _Part(view, slice(expert * view.shape[-1], (expert + 1) * view.shape[-1]))
        for each in views
        for expert, view in enumerate(each)
    ]


def _count(parts: list[_Part]) -> int:
    return max(int(part.channels.stop) for part in parts)


def _far_from_limits(weight: Tensor) -> bool:
    limits = torch.finfo(weight.dtype)
    least, most = limits.tiny * 2.0**_MOST_SCALED, limits.max / 2.0**_MOST_SCALED
    for part in weight.flatten().split(_CHECKED_TOGETHER):
        sizes = part.abs()
        largest = sizes.amax()
        smallest = sizes.masked_fill_(sizes == 0, 1.0).amin()
        if not bool((smallest >= least) & (largest <= most)):
            return False
    return True


def _exact(parts: list[_Part], factors: Tensor) -> Tensor:
    exact = torch.ones(len(factors), dtype=torch.bool)
    for view, channels in parts:
        own = factors[channels].to(view.dtype)
        rows = view[None] if view.dim() == 1 else view
        if rows.stride(-1) == 1:
            for some in rows.split(max(1, _CHECKED_TOGETHER // len(own))):
                exact[channels] &= (some * own / own == some).all(0)
        else:  # a transposed matrix, in the order of its memory
            step = max(1, _CHECKED_TOGETHER // len(rows))
            parts_of = zip(rows.t().split(step), own[:, None].split(step), strict=True)
            exact[channels] &= torch.cat([(some * by / by == some).all(1) for some, by in parts_of])
    return exact
