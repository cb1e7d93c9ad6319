"""Channel scaling without a search: loud channels become quieter, and the weights that read them larger."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from torch_armllm.quant.layers import Layer, is_linear, weight_of
from torch_armllm.quant.methods.calibrated.channel_scaling import (
    MAX_EXPONENT,
    AppliedScaling,
    ChannelScaling,
    find_scalings,
    undo_scalings,
)
from torch_armllm.quant.methods.calibrated.input_capture import FloatInputs, record_inputs
from torch_armllm.quant.methods.calibrated.layerwise import Stages

logger = logging.getLogger(__name__)

_POWER = 0.25
"""A channel is scaled by its root mean square to this power: measured best on several models."""
_FLOOR = 1e-3
"""Lower bound of an energy, as a fraction of the mean: silent channels still count a little."""


class Smoothing:
    """Scales the channels of a model's stages by the fourth root of their size, as powers of two.

    A token's inputs share one INT8 scale, so loud channels cost the others precision; and a weight of a loud
    channel loses more by rounding than its neighbors do.  Scaling helps against both, and the float model
    computes the same bits as before: see `find_scalings`.  SmoothQuant (arXiv 2211.10438) scales for the
    first, AWQ (arXiv 2306.00978) for the second.

    Attributes:
        scaled: the scalings that were applied, in order.
    """

    def __init__(
        self, model: nn.Module, stages: Stages, layers: Sequence[Layer], stage_of: Mapping[str, int]
    ) -> None:
        """Prepares to scale.

        Args:
            model: the float model.
            stages: runs it.
            layers: the layers to quantize.
            stage_of: the stage of each layer by name; layers outside of all stages have none.
        """
        self.scaled: list[AppliedScaling] = []
        self._model, self._stages = model, stages
        self._layers, self._stage_of = layers, stage_of

    def run(self, stage: int) -> dict[str, FloatInputs]:
        """Runs a stage in the float model and scales its channels.

        Returns:
            The inputs of its layers, as the scaled layers read them, by layer name.
        """
        inside = [x for x in self._layers if self._stage_of.get(x.name) == stage]
        inputs = record_inputs(inside, lambda: self._stages.run_float(stage))
        of_module = {
            id(x.module): inputs[x.name] for x in inside if x.name in inputs and inputs[x.name].inputs
        }
        module = self._stages.modules[stage]
        linears = [m for m in module.modules() if is_linear(m) and not weight_of(m).is_meta]
        scalings, refused = find_scalings(module, linears, lambda: self._stages.sample(stage))
        shared = self._parameters_elsewhere(stage)
        for scaling in scalings:
            read = {id(x): x for r in scaling.readers if (x := of_module.get(id(r))) is not None}
            if len(read) != 1 or any(id(p) in shared for m in scaling.modules for p in m.parameters()):
                continue
            (entry,) = read.values()
            powers = powers_for(scaling, energy_of(entry.inputs))
            powers = powers.to(weight_of(scaling.readers[0]).dtype)
            scaling.scale(powers)
            self.scaled.append(AppliedScaling(scaling, powers))
            entry.inputs = [x / scaling.spread(powers).to(x.dtype) for x in entry.inputs]
        if refused:
            logger.info("stage %d: channels of %s are not scaled", stage, ", ".join(refused))
        return inputs

    def undo(self) -> None:
        """Restores the float model."""
        undo_scalings(self.scaled)
        self.scaled = []

    def _parameters_elsewhere(self, stage: int) -> set[int]:
        """Returns the ids of the parameters that other stages, and modules outside of a stage, have."""
        inside = {id(module) for module in self._stages.modules[stage].modules()}
        elsewhere = [module for module in self._model.modules() if id(module) not in inside]
        for index, other in enumerate(self._stages.modules):
            if index != stage:
                elsewhere += other.modules()
        return {id(p) for module in elsewhere for p in module._parameters.values() if p is not None}


def energy_of(inputs: Sequence[Tensor]) -> Tensor:
    """Returns the mean square of each channel of inputs (…, K): float32 (K,), about 1 on average.

    Inputs of zeros, and such with a NaN or an infinity, count the same in all channels.
    """
    rows = [x.reshape(-1, x.shape[-1]) for x in inputs]
    count = max(sum(len(x) for x in rows), 1)
    energy = torch.stack([x.float().square().sum(0) for x in rows]).sum(0) / count
    mean = float(energy.mean())
    if not 0 < mean < float("inf"):
        return torch.ones_like(energy)
    return energy / mean + _FLOOR


def powers_for(scaling: ChannelScaling, energy: Tensor) -> Tensor:
    """Returns a power of two for each written channel, float32, from the energies (K,) of the read ones."""
    exponents = scaling.gathered(energy).log2() / 2
    exponents = (exponents - exponents.mean()) * _POWER
    return torch.exp2(exponents.round().clamp(-MAX_EXPONENT, MAX_EXPONENT))
