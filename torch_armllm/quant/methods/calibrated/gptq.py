"""The method ``gptq``: integers by second moments, one decoder layer after the other."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from torch_armllm.quant.layers import Layer
from torch_armllm.quant.methods.calibrated.base import CalibratedMethod
from torch_armllm.quant.methods.calibrated.expert_inputs import ExpertInputs
from torch_armllm.quant.methods.calibrated.gptq_solver import GptqRounding
from torch_armllm.quant.methods.calibrated.hessian import Hessian
from torch_armllm.quant.methods.calibrated.input_capture import FloatInputs, record_inputs
from torch_armllm.quant.methods.calibrated.resume_cache import ResumeCache
from torch_armllm.quant.modules.experts import QuantExperts
from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.quant.schemes.base import Rounding, Scheme
from torch_armllm.quant.schemes.search import Search
from torch_armllm.quant.spill_file import SpillFile

_NARROW = 4096
"""Inputs of layers that make up for what went wrong before them: for wider ones that takes too long."""


class Gptq(CalibratedMethod):
    """Calibrates with texts; heads and what lies outside of the decoder layers are rounded by search.

    A stage is entered when the first of its layers is asked for: it then runs as floats, on what float layers
    gave, and is followed layer by layer on what quantized ones gave, so that each makes up for those before
    it.  Layers that read the same input share its moments.
    """

    name = "gptq"

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        tokens: Tensor,
        resume: Path | None = None,
        on_meta: bool = False,
    ) -> None:
        """Takes token ids (sequences, length), and a folder that keeps what is found: see `ResumeCache`."""
        super().__init__(model, layers, tokens, on_meta)
        self._inputs: dict[str, FloatInputs] = {}
        self._roundings: dict[int, Rounding] = {}
        self._experts: dict[str, ExpertInputs] = {}
        self._packed: dict[nn.Module, nn.Module] = {}
        self._stage_of_module: dict[nn.Module, int] = {}
        self._resume_cache = ResumeCache(resume, tokens, str(model)) if resume is not None else None

    def rounding(self, layer: Layer, scheme: Scheme, weight: str = "weight", expert: int = 0) -> Rounding:  # noqa: D102
        stage = self._stage_of.get(layer.name)
        if stage is None:
            return Search()
        if self._resume_cache is None:
            return self._find(layer, stage, weight, expert)
        return self._resume_cache.rounding(
            layer.name, scheme, weight, expert, lambda: self._find(layer, stage, weight, expert)
        )

    def _find(self, layer: Layer, stage: int, weight: str, expert: int) -> Rounding:
        """How a matrix is rounded, by what reaches it now."""
        if stage != self._now:
            self._enter(stage)
        wanted = self._inputs.get(layer.name)
        if wanted is None:
            return Search()
        if layer.layout is not None:
            if layer.name not in self._experts:
                self._experts[layer.name] = self._see_experts(layer)
            return self._experts[layer.name].rounding(weight, expert)
        if id(wanted) not in self._roundings:
            rows = max(part.shape[0] for part in layer.weights())
            self._roundings[id(wanted)] = self._see(wanted, rows)
        return self._roundings[id(wanted)]

    def on_packed(self, layer: Layer, made: QuantLinear | QuantExperts, spill: SpillFile) -> None:  # noqa: D102
        if layer.name in self._stage_of:
            ready = copy.copy(made)
            ready._buffers = {**made._buffers, **spill.peek(made)}
            self._packed[layer.module] = ready
            self._stage_of_module[layer.module] = self._stage_of[layer.name]
            self._use(True)
            if self._resume_cache is not None:
                self._resume_cache.finish(layer.name)

    def commit(self) -> None:  # noqa: D102
        self._use(False)

    def abandon(self) -> None:  # noqa: D102
        self._use(False)

    def _use(self, packed: bool) -> None:
        """Lets the layers that are done compute with their packed weights, or with their float ones."""
        for module, ready in self._packed.items():
            if packed:
                module.forward = ready.forward  # type: ignore[method-assign]
            else:
                module.__dict__.pop("forward", None)

    def finish(self, stage: int) -> None:  # noqa: D102
        self._enter(stage)
        self._leave()

    def _enter(self, stage: int) -> None:
        """Moves on to a stage, and sees what reaches its layers in the float model."""
        while self._now < stage:
            self._leave()
            self._now += 1
            self._use(False)
            if self.stages.streamed:
                self._packed = {
                    m: x for m, x in self._packed.items() if self._stage_of_module[m] >= self._now
                }
            inside = [x for x in self._layers if self._stage_of.get(x.name) == self._now]
            watched = inside if self._now == stage else []
            self._inputs = record_inputs(watched, lambda: self.stages.run_float(self._now))
            self._use(True)

    def _leave(self) -> None:
        """Brings what the quantized layers of a stage give to the next one."""
        if self._left < self._now:
            self._use(True)
            self.stages.advance(self._now)
            self._left = self._now
            self._inputs, self._roundings, self._experts = {}, {}, {}

    def _see(self, wanted: FloatInputs, rows: int) -> Rounding:
        """Runs the stage as far as a layer and sums up what reaches it."""
        moments = Hessian(wanted.inputs[0].shape[-1])
        columns = wanted.inputs[0].shape[-1]
        # a layer that reads some tokens only, as experts do, may have read others in the float model
        alike = [x.numel() // columns for x in wanted.inputs] == self.stages.sizes
        corrected = alike and columns <= _NARROW
        floats = iter(wanted.inputs)

        def see(arguments: tuple[Any, ...]) -> None:
            moments.add(arguments[0], wanted=next(floats) if corrected else None)

        self.stages.run_until(self._now, wanted.leader, see)
        return GptqRounding(moments.damped(), rows, correction=moments.correction())

    def _see_experts(self, layer: Layer) -> ExpertInputs:
        found = ExpertInputs(layer)
        self.stages.run_until(self._now, layer.module, lambda arguments: found.add(*arguments))
        return found
