"""The method ``gptq``: integers by second moments, one decoder layer after the other."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from torch_armllm.quant.calibration.experts import ExpertInputs
from torch_armllm.quant.calibration.moments import Moments
from torch_armllm.quant.calibration.solver import Compensated
from torch_armllm.quant.calibration.stream import Stages, watch
from torch_armllm.quant.layers import Layer
from torch_armllm.quant.method import Method, Search
from torch_armllm.quant.modules import QuantExperts, QuantLinear
from torch_armllm.quant.scheme import Rounding, Scheme
from torch_armllm.quant.spool import Spool

BATCH_TOKENS = 4096
"""Tokens that run through a layer at a time."""


class Gptq(Method):
    """Calibrates with texts; heads and what lies outside of the decoder layers are rounded by search.

    A stage is collected when the first of its layers is asked for: it runs on what the quantised layers
    before it gave, so that each makes up for them too.  Layers that read the same input share its moments.
    """

    name = "gptq"

    def __init__(self, model: nn.Module, layers: Sequence[Layer], tokens: Tensor) -> None:
        """Takes token ids (sequences, length)."""
        self._stages = Stages(model, tokens, max(1, BATCH_TOKENS // tokens.shape[1]))
        homes = {id(m): i for i, stage in enumerate(self._stages.modules) for m in stage.modules()}
        self._homes = {
            x.name: homes[id(x.module)] for x in layers if x.kind != "head" and id(x.module) in homes
        }
        self._layers = {x.name: x for x in layers}
        self._now = -1
        self._moments: dict[str, Moments] = {}
        self._experts: dict[str, ExpertInputs] = {}
        self._solvers: dict[int, Compensated] = {}
        self._replaced: list[nn.Module] = []

    def order(self, layers: Sequence[Layer]) -> Sequence[Layer]:  # noqa: D102
        last = len(self._stages.modules)
        return sorted(layers, key=lambda x: self._homes.get(x.name, last))

    def rounding(self, layer: Layer, scheme: Scheme, weight: str = "weight", expert: int = 0) -> Rounding:  # noqa: D102
        stage = self._homes.get(layer.name)
        if stage is None:
            return Search()
        if stage != self._now:
            self._enter(stage)
        if layer.layout is not None:
            inputs = self._experts.get(layer.name)
            return Search() if inputs is None else inputs.rounding(weight, expert)
        moments = self._moments.get(layer.name)
        if moments is None or not moments.count:
            return Search()
        if id(moments) not in self._solvers:
            rows = max(part.shape[0] for part in layer.weights())
            self._solvers[id(moments)] = Compensated(moments.hessian(), rows)
        return self._solvers[id(moments)]

    def took(self, layer: Layer, made: QuantLinear | QuantExperts, spool: Spool) -> None:  # noqa: D102
        if layer.name in self._homes:
            ready = copy.copy(made)
            ready._buffers = {**made._buffers, **spool.peek(made)}
            layer.module.forward = ready.forward  # type: ignore[method-assign]
            self._replaced.append(layer.module)

    def commit(self) -> None:  # noqa: D102
        self._leave()

    def abandon(self) -> None:  # noqa: D102
        self._leave()

    def _leave(self) -> None:
        for module in self._replaced:
            module.__dict__.pop("forward", None)
        self._replaced = []

    def _enter(self, stage: int) -> None:
        """Moves on to a stage and collects what reaches its layers."""
        self._moments, self._experts, self._solvers = {}, {}, {}
        if self._now >= 0:
            self._stages.advance(self._now)
        if self._stages.streamed:
            self._leave()
        for passed in range(self._now + 1, stage):
            self._stages.advance(passed)
        self._now = stage
        inside = {id(x.module): x for x in self._layers.values() if self._homes.get(x.name) == stage}
        seen = Inputs()

        def see(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            layer = inside[id(module)]
            if layer.layout is not None:
                self._experts.setdefault(layer.name, ExpertInputs(layer)).add(*arguments)
            else:
                self._moments[layer.name] = seen.add(layer.name, arguments[0])

        watch([x.module for x in inside.values()], see, lambda: self._stages.run(stage))


class Inputs:
    """Moments of several layers; those that read one tensor share theirs."""

    def __init__(self) -> None:
        self._last: Tensor | None = None
        self._leader = ""
        self._leaders: dict[str, str] = {}
        self._moments: dict[str, Moments] = {}

    def add(self, name: str, x: Tensor) -> Moments:
        """Counts an input of a layer and returns its moments."""
        if name not in self._leaders:
            self._leaders[name] = self._leader if x is self._last else name
        leader = self._leaders[name]
        if leader == name:
            self._moments.setdefault(name, Moments(x.shape[-1])).add(x)
            self._last, self._leader = x, name
        return self._moments[leader]
