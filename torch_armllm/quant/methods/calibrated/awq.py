"""The method ``awq``: channels scaled up where rounding costs most, then the usual search."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from torch_armllm.quant.layers import Layer, weight_of
from torch_armllm.quant.methods.calibrated.base import CalibratedMethod
from torch_armllm.quant.methods.calibrated.channel_scaling import ChannelScaling, find_scalings
from torch_armllm.quant.methods.calibrated.hessian import Hessian
from torch_armllm.quant.methods.calibrated.input_capture import record_inputs
from torch_armllm.quant.schemes.base import Rounding, Scheme
from torch_armllm.quant.schemes.search import Search

logger = logging.getLogger(__name__)

POWERS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of a channel's mean size: how far it is scaled up."""
_FURTHEST = 4
"""Binary orders of magnitude that a channel is scaled by at most."""


class Awq(CalibratedMethod):
    """Activation-aware scales (arXiv 2306.00978), as powers of two, which leave the model as it is.

    For each activation that can be scaled (see `find_scalings`) a power of the channels' sizes is chosen by the
    squared error of what the layers that read it give.  Their scales are then searched with regard to what
    each channel carries.
    """

    name = "awq"

    def __init__(
        self, model: nn.Module, layers: Sequence[Layer], tokens: Tensor, on_meta: bool = False
    ) -> None:
        """Takes token ids (sequences, length)."""
        super().__init__(model, layers, tokens, on_meta)
        self._roundings: dict[str, Rounding] = {}
        self._scaled: list[tuple[ChannelScaling, Tensor]] = []

    def rounding(self, layer: Layer, scheme: Scheme, weight: str = "weight", expert: int = 0) -> Rounding:  # noqa: D102
        stage = self._stage_of.get(layer.name)
        while stage is not None and self._now < stage:
            self._now += 1
            self._scale(self._now, scheme)
        return Search() if weight == "down_proj" else self._roundings.get(layer.name, Search())

    def abandon(self) -> None:  # noqa: D102
        for scaling, powers in reversed(self._scaled):
            scaling.scale(1 / powers)
        self._scaled = []

    def finish(self, stage: int) -> None:  # noqa: D102
        if self._now < stage:
            self._now = stage
            self.stages.run_float(stage)
        self._scaled, self._roundings = [], {}

    def _scale(self, stage: int, scheme: Scheme) -> None:
        """Scales the channels of a stage, and finds what reaches its layers then."""
        inside = [x for x in self._layers if self._stage_of.get(x.name) == stage]
        inputs = record_inputs(inside, lambda: self.stages.run_float(stage))
        moments: dict[int, Hessian] = {}
        for wanted in {id(w): w for w in inputs.values()}.values():
            if wanted.inputs:
                moments[id(wanted)] = Hessian(wanted.inputs[0].shape[-1])
                for x in wanted.inputs:
                    moments[id(wanted)].add(x)
        of = {id(x.module): moments[id(inputs[x.name])] for x in inside if id(inputs.get(x.name)) in moments}
        linears = [x.module for x in inside if id(x.module) in of]
        module = self.stages.modules[stage]
        scalings, refused = find_scalings(module, linears, lambda: self.stages.sample(stage))
        for scaling in scalings:
            found = of[id(scaling.readers[0])]
            powers = choose_powers(scaling, found, scheme)
            scaling.scale(powers)
            self._scaled.append((scaling, powers))
            factors = scaling.spread(powers.float())
            found.total /= factors[:, None] * factors
        if refused:
            logger.info("stage %d: channels of %s are not scaled", stage, ", ".join(refused))
        for layer in inside:
            if id(layer.module) in of:
                energy = of[id(layer.module)].damped().diagonal()
                self._roundings[layer.name] = Search(energy / energy.mean())


def choose_powers(scaling: ChannelScaling, moments: Hessian, scheme: Scheme) -> Tensor:
    """Powers of two (written,) that make the readers' squared error the least, of their weights' type."""
    hessian = moments.damped()
    size = scaling.gathered(hessian.diagonal()).sqrt()
    size = size / size.log().mean().exp()
    best, least = torch.ones_like(size), float("inf")
    for power in POWERS:
        powers = torch.exp2((size**power).log2().round().clamp(-_FURTHEST, _FURTHEST))
        factors = scaling.spread(powers)
        energy = hessian.diagonal() / factors.square()
        error = 0.0
        for reader in scaling.readers:
            weight = weight_of(reader).detach().float()
            weight = weight.t() if isinstance(reader, Conv1D) else weight
            found, _ = scheme.quantize(weight * factors, Search(energy / energy.mean()))
            left = scheme.dequantize(found) / factors - weight
            error += float(((left @ hessian) * left).sum())
        if error < least:
            best, least = powers, error
    return best.to(weight_of(scaling.readers[0]).dtype)
