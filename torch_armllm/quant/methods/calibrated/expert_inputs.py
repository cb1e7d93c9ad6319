"""Calibration inputs of a layer's experts, with a prior for rarely chosen experts."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torch_armllm.hf.expert_layout import ExpertLayout, parameter
from torch_armllm.ops.activation import FUNCTIONS
from torch_armllm.ops.linear import rotate_groups
from torch_armllm.quant.layers import Layer
from torch_armllm.quant.methods.calibrated.gptq_solver import GptqRounding
from torch_armllm.quant.methods.calibrated.hessian import Hessian
from torch_armllm.quant.schemes.base import Quantized, Rounding, Scheme

SHARE = 0.1
"""Weight of all tokens together for every expert, as a fraction of an average expert's weight."""
_PRIOR_TOKENS = 1024
"""Tokens of the prior that run through every expert's gate and up, for the inputs of its down projection."""
_MAX_SOLVERS = 3
"""Solvers that are cached."""


class ExpertInputs:
    """The tokens of a layer's experts, and their routing.

    An expert's Hessian weights its tokens by the squared routing weight, as the output error does.  All
    tokens are added with a total weight of `SHARE` of an average expert's: a prior for experts that
    calibration chooses rarely or never.

    Args:
        layer: the layer.
        rotated: its weights are rotated, and so are the inputs that Hessians see.
    """

    def __init__(self, layer: Layer, rotated: bool = False) -> None:
        assert layer.layout is not None
        self._turn = rotate_groups if rotated else Tensor.float
        self._module, self._layout = layer.module, layer.layout
        inner, outer = (parameter(self._module, name) for name in self._layout.weights)
        self._inner, self._outer = self._layout.inner(inner), self._layout.outer(outer)
        self._inputs: list[Tensor] = []
        self._counts: list[Tensor] = []
        self._all: Hessian | None = None
        self._solvers: OrderedDict[tuple[bool, int], GptqRounding] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, x: Tensor, chosen: Tensor | None = None, weights: Tensor | None = None) -> None:
        """Adds the arguments of a call of the module: (T, H), (T, k) and (T, k), or equal parts, (E·T, H)."""
        experts = len(self._outer)
        x = x.detach().reshape(-1, x.shape[-1])
        if chosen is None or weights is None:
            parts = x.view(experts, -1, x.shape[-1])
            counts = torch.zeros(x.shape[0], experts)
            for expert, part in enumerate(parts):
                begin = expert * len(part)
                counts[begin : begin + len(part), expert] = (part != 0).any(dim=1).float()
        else:
            counts = torch.zeros(x.shape[0], experts + self._layout.identity_experts)
            squared_weights = weights.detach().float().reshape(len(x), -1).square()
            counts.scatter_add_(1, chosen.reshape(len(x), -1).long(), squared_weights)
            counts = counts[:, :experts]
        self._inputs.append(x)
        self._counts.append(counts)

    def rounding(self, weight: str, expert: int) -> Rounding:
        """Returns the rounding of an expert's matrix; the Hessian is computed at its first rows."""
        return _Expert(self, weight == self._layout.weights[1], expert)

    def solver(self, down: bool, expert: int) -> GptqRounding:
        """Returns the solver of an expert's gate and up, or of its down projection; a few are cached."""
        with self._lock:
            if (down, expert) not in self._solvers:
                self._solvers[down, expert] = self._solve(down, expert)
                while len(self._solvers) > _MAX_SOLVERS:
                    self._solvers.popitem(last=False)
            return self._solvers[down, expert]

    def columns(self, down: bool) -> int:
        """Number of inputs of the down projections, or of the gate and up projections."""
        return self._outer[0].shape[1] if down else self._outer[0].shape[0]

    def _solve(self, down: bool, expert: int) -> GptqRounding:
        x, counts = self._joined()
        own = counts[:, expert]
        average = float(counts.mean()) or 1.0
        rows = own.nonzero()[:, 0]
        if down:
            some = torch.linspace(0, len(x) - 1, min(_PRIOR_TOKENS, len(x))).long()
            share = torch.full((len(some),), SHARE * average * len(x) / len(some))
            hessian = Hessian(self.columns(True))
            for part, count in ((x[rows], own[rows]), (x[some], share)):
                inputs = down_inputs(self._module, self._layout, self._inner, expert, part)
                hessian.add(self._turn(inputs), count)
        else:
            if self._all is None:
                self._all = Hessian(self.columns(False))
                self._all.add(self._turn(x))
            hessian = Hessian(self.columns(False))
            hessian.total += self._all.total * (SHARE * average)
            hessian.add(self._turn(x[rows]), own[rows])
        hessian.count = 1  # only proportions count
        return GptqRounding(hessian.damped(), len(self._outer[0]) if down else len(self._inner[0][0]))

    def _joined(self) -> tuple[Tensor, Tensor]:
        if len(self._inputs) > 1:
            self._inputs, self._counts = [torch.cat(self._inputs)], [torch.cat(self._counts)]
        return self._inputs[0], self._counts[0]


def down_inputs(
    module: nn.Module, layout: ExpertLayout, inner: Sequence[list[Tensor]], expert: int, x: Tensor
) -> Tensor:
    """Returns the inputs of an expert's down projection for tokens x (n, H): float32 (n, I).

    ``inner`` is `ExpertLayout.inner` of the experts' first weight.
    """
    x = x.float()
    halves = [x @ part[expert].float().t() for part in inner]
    bias = layout.biases(module)[0]
    if bias is not None:
        own = bias[expert].float().view(len(halves), -1)
        halves = [half + row for half, row in zip(halves, own, strict=True)]
    return FUNCTIONS[layout.activation](halves[0], halves[-1], layout.limit, layout.up_limit)


class _Expert(Rounding):
    """Rounds one matrix of an expert; the solver is created at the first rows."""

    def __init__(self, inputs: ExpertInputs, down: bool, expert: int) -> None:
        self._inputs, self._down, self._index = inputs, down, expert
        self.chunk = inputs.columns(down) * 512

    def rows(self, weight: Tensor, scheme: Scheme) -> Quantized:
        return self._inputs.solver(self._down, self._index).rows(weight, scheme)
