"""The method ``awq``: activation-aware channel scaling, then the usual search of scales."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torch_armllm.quant.layers import Layer
from torch_armllm.quant.methods.calibrated.base import CalibratedMethod
from torch_armllm.quant.methods.calibrated.channel_scaling import MAX_EXPONENT, ChannelScaling
from torch_armllm.quant.methods.calibrated.hessian import DAMPING, Hessian
from torch_armllm.quant.methods.calibrated.input_capture import FloatInputs
from torch_armllm.quant.methods.calibrated.smoothing import energy_of
from torch_armllm.quant.schemes.base import Rounding, Scheme, Search

POWERS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Exponents to try: a channel is scaled by its root mean square to this power."""
_MOST_WEIGHTS = 16
"""Weights that choose the power of channels that many experts read."""


class Awq(CalibratedMethod):
    """Activation-aware channel scales (arXiv 2306.00978) as powers of two, which do not change the outputs.

    For each activation that can be scaled (see `StageScaling`), a power of the channels' sizes is chosen by
    the squared output error of the layers that read it.  The scales of these layers are then searched with
    errors weighted by the energy of each channel.
    """

    name = "awq"

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        tokens: Tensor,
        on_meta: bool = False,
        rotate: bool = True,
    ) -> None:
        """Prepares to run the model."""
        super().__init__(model, layers, tokens, on_meta, rotate=rotate)
        self._roundings: dict[str, Rounding] = {}

    def rounding(self, layer: Layer, scheme: Scheme, weight: str = "weight", expert: int = 0) -> Rounding:  # noqa: D102
        stage = self._stage_of.get(layer.name)
        while stage is not None and self._stage < stage:
            self._stage += 1
            self._scale(self._stage, scheme)
        seen = self.sees_inputs(layer, scheme, weight)
        return self._roundings.get(layer.name, Search()) if seen else Search()

    def finish(self, stage: int) -> None:  # noqa: D102
        if self._stage < stage:
            self._stage = stage
            self.stages.run_float(stage)
        self._scaling.forget()
        self._roundings = {}

    def _scale(self, stage: int, scheme: Scheme) -> None:
        """Scales the channels of a stage, and creates the roundings of its layers."""

        def choose(scaling: ChannelScaling, read: FloatInputs) -> Tensor | None:
            if scaling.writer.inside:
                return None
            hessian = Hessian(read.inputs[0].shape[-1])
            for x in read.inputs:
                hessian.add(x)
            return choose_powers(scaling, self._weights_of(scaling), hessian, scheme)

        inputs = self._scaling.run(stage, choose)
        for name, read in inputs.items():
            if read.inputs:
                self._roundings[name] = Search(energy_of(read.inputs, floor=DAMPING))

    def _weights_of(self, scaling: ChannelScaling) -> list[Tensor]:
        """Returns views (N, K) of the weights that read the channels and are quantized; of many, a few."""
        quantized = {id(layer.module) for layer in self._layers}
        weights = [w for r in scaling.readers if id(r.module) in quantized for w in r.matrices()]
        return weights[:: -(-len(weights) // _MOST_WEIGHTS)]


def choose_powers(
    scaling: ChannelScaling, weights: Sequence[Tensor], hessian: Hessian, scheme: Scheme
) -> Tensor:
    """Returns the powers of two (written,) with the least squared error of the weights (N, K)."""
    second_moments = hessian.damped()
    size = scaling.gathered(second_moments.diagonal()).sqrt()
    size = size / size.log().mean().exp()
    best, least = torch.ones_like(size), float("inf")
    for power in POWERS:
        powers = torch.exp2((size**power).log2().round().clamp(-MAX_EXPONENT, MAX_EXPONENT))
        factors = scaling.spread(powers)
        energy = second_moments.diagonal() / factors.square()
        error = 0.0
        for weight in weights:
            quantized, _ = scheme.quantize(weight.float() * factors, Search(energy / energy.mean()))
            error_matrix = scheme.dequantize(quantized) / factors - weight.float()
            error += float(((error_matrix @ second_moments) * error_matrix).sum())
        if error < least:
            best, least = powers, error
    return best
