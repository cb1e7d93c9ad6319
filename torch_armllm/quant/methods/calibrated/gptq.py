"""The method ``gptq``: error feedback by the Hessian of each layer, one decoder layer after the other."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from torch_armllm.ops.linear import rotate_groups
from torch_armllm.quant.layers import Layer
from torch_armllm.quant.methods.calibrated.base import CalibratedMethod
from torch_armllm.quant.methods.calibrated.expert_inputs import ExpertInputs
from torch_armllm.quant.methods.calibrated.gptq_solver import GptqRounding
from torch_armllm.quant.methods.calibrated.hessian import Hessian
from torch_armllm.quant.methods.calibrated.input_capture import FloatInputs, record_inputs
from torch_armllm.quant.methods.calibrated.resume_cache import ResumeCache
from torch_armllm.quant.methods.calibrated.smoothing import smoothing_powers
from torch_armllm.quant.modules.experts import QuantExperts
from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.quant.modules.tied_embedding import SHARED_SCHEMES
from torch_armllm.quant.schemes.base import Rounding, Scheme, Search
from torch_armllm.quant.spill_file import SpillFile

_NARROW = 4096
"""Most inputs of a layer that is corrected for the errors of earlier layers: wider ones take too long."""


class Gptq(CalibratedMethod):
    """GPTQ (arXiv 2210.17323) on calibration texts; layers outside of the decoder layers search their scales.

    If each stage runs alone, its channels are scaled first: see `smoothing_powers`.  Linear layers are
    rotated: see `QuantLinear.rotated`.

    A stage is entered when the rounding of its first layer is requested.  It then runs once in floats, on the
    outputs of the float stages before it.  For each of its layers it runs again on the outputs of the
    quantized layers before, so that each layer compensates for their errors.  Layers that read the same input
    share its Hessian.
    """

    name = "gptq"

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        tokens: Tensor,
        resume: Path | None = None,
        on_meta: bool = False,
        smooth: bool = True,
        rotate: bool = True,
    ) -> None:
        """Prepares.

        Args:
            model: see `CalibratedMethod`, as ``layers``, ``tokens`` and ``on_meta``.
            layers: the layers to quantize.
            tokens: token ids (sequences, length).
            resume: the folder of a `ResumeCache`.
            on_meta: decoder layers are on the meta device.
            smooth: scale channels.
            rotate: see `Method`.
        """
        super().__init__(model, layers, tokens, on_meta, rotate=rotate)
        self._smooth = smooth = smooth and self.stages.streamed
        self._inputs: dict[str, FloatInputs] = {}
        self._roundings: dict[tuple[int, bool], Rounding] = {}
        self._experts: dict[str, ExpertInputs] = {}
        self._packed: dict[nn.Module, nn.Module] = {}
        self._stage_of_module: dict[nn.Module, int] = {}
        described = f"{model} {'scaled where exact' if smooth else ''} {'rotated' if rotate else ''}"
        self._resume_cache = ResumeCache(resume, tokens, described) if resume is not None else None

    def rounding(self, layer: Layer, scheme: Scheme, weight: str = "weight", expert: int = 0) -> Rounding:  # noqa: D102
        stage = self._stage_of.get(layer.name)
        if stage is None:
            return Search()
        if stage != self._stage:
            self._enter(stage)
        if self._resume_cache is None:
            return self._find(layer, scheme, stage, weight, expert)
        return self._resume_cache.rounding(
            layer.name, scheme, weight, expert, lambda: self._find(layer, scheme, stage, weight, expert)
        )

    def _find(self, layer: Layer, scheme: Scheme, stage: int, weight: str, expert: int) -> Rounding:
        """Returns the rounding of a matrix for its current inputs."""
        float_inputs = self._inputs.get(layer.name)
        if float_inputs is None:
            return Search()
        if layer.layout is not None:
            if layer.name not in self._experts:
                self._experts[layer.name] = self._expert_inputs(layer, self.rotates(layer, scheme))
            return self._experts[layer.name].rounding(weight, expert)
        rotated = self.rotates(layer, scheme)
        key = id(float_inputs), rotated
        if key not in self._roundings:
            rows = max(part.shape[0] for part in layer.weights())
            self._roundings[key] = self._accumulate(float_inputs, rows, rotated)
        return self._roundings[key]

    def rotates(self, layer: Layer, scheme: Scheme) -> bool:  # noqa: D102
        if layer.kind == "head":
            suitable = scheme.name in SHARED_SCHEMES  # an INT4 head is not calibrated
        else:
            suitable = layer.kind in ("linear", "experts") and layer.name in self._stage_of
        return self._rotate and suitable and layer.has_whole_groups()

    def on_packed(self, layer: Layer, module: QuantLinear | QuantExperts, spill: SpillFile) -> None:  # noqa: D102
        if layer.name in self._stage_of:
            ready = copy.copy(module)
            ready._buffers = {**module._buffers, **spill.peek(module)}
            self._packed[layer.module] = ready
            self._stage_of_module[layer.module] = self._stage_of[layer.name]
            self._use(True)
            if self._resume_cache is not None:
                self._resume_cache.finish(layer.name)

    def commit(self) -> None:  # noqa: D102
        self._use(False)

    def abandon(self) -> None:  # noqa: D102
        self._use(False)
        super().abandon()

    def _use(self, packed: bool) -> None:
        """Makes the quantized layers compute with their packed weights, or with their float weights."""
        for module, ready in self._packed.items():
            if packed:
                module.forward = ready.forward  # type: ignore[method-assign]
            else:
                module.__dict__.pop("forward", None)

    def finish(self, stage: int) -> None:  # noqa: D102
        self._enter(stage)
        self._advance()
        self._scaling.forget()

    def _enter(self, stage: int) -> None:
        """Advances to a stage, and records the inputs of its layers in the float model."""
        while self._stage < stage:
            self._advance()
            self._stage += 1
            self._use(False)
            if self.stages.streamed:
                self._packed = {
                    m: x for m, x in self._packed.items() if self._stage_of_module[m] >= self._stage
                }
            self._inputs = self._run_float()
            self._use(True)

    def _run_float(self) -> dict[str, FloatInputs]:
        """Runs the current stage in the float model, and returns the inputs of its layers."""
        if self._smooth:
            return self._scaling.run(self._stage, smoothing_powers)
        inside = [x for x in self._layers if self._stage_of.get(x.name) == self._stage]
        return record_inputs(inside, lambda: self.stages.run_float(self._stage))

    def _advance(self) -> None:
        """Runs the current stage with its quantized layers, for the inputs of the next stage."""
        if self._advanced < self._stage:
            self._use(True)
            self.stages.advance(self._stage)
            self._advanced = self._stage
            self._inputs, self._roundings, self._experts = {}, {}, {}

    def _accumulate(self, float_inputs: FloatInputs, rows: int, rotated: bool) -> Rounding:
        """Runs the stage up to a layer and accumulates the Hessian of its inputs."""
        hessian = Hessian(float_inputs.inputs[0].shape[-1])
        columns = float_inputs.inputs[0].shape[-1]
        # a layer that reads only some of the tokens, as experts do, may read other tokens in the float model
        same_tokens = [x.numel() // columns for x in float_inputs.inputs] == self.stages.sizes
        corrected = same_tokens and columns <= _NARROW
        floats = iter(float_inputs.inputs)

        def see(arguments: tuple[Any, ...]) -> None:
            x, expected = arguments[0], next(floats) if corrected else None
            if rotated:
                x = rotate_groups(x)
                expected = None if expected is None else rotate_groups(expected)
            hessian.add(x, float_inputs=expected)

        self.stages.run_until(self._stage, float_inputs.leader, see)
        return GptqRounding(hessian.damped(hessian.damping), rows, correction=hessian.correction())

    def _expert_inputs(self, layer: Layer, rotated: bool) -> ExpertInputs:
        inputs = ExpertInputs(layer, rotated)
        self.stages.run_until(self._stage, layer.module, lambda arguments: inputs.add(*arguments))
        return inputs
