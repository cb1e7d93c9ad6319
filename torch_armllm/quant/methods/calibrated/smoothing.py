"""Channel scaling without a search: loud channels become quieter, and the weights that read them larger."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_armllm.hf.expert_layout import parameter
from torch_armllm.quant.methods.calibrated.channel_scaling import MAX_EXPONENT, ChannelScaling
from torch_armllm.quant.methods.calibrated.expert_inputs import down_inputs
from torch_armllm.quant.methods.calibrated.input_capture import FloatInputs

_POWER = 0.25
"""A channel is scaled by its root mean square to this power: measured best on several models."""
_FLOOR = 1e-3
"""Lower bound of an energy, as a fraction of the mean: silent channels still count a little."""

_TOKENS_INSIDE = 64
"""Tokens that run through every expert's gate and up projection, for the sizes of the channels inside."""


def energy_of(inputs: Sequence[Tensor], floor: float = _FLOOR) -> Tensor:
    """Returns the mean square of each channel of inputs (…, K): float32 (K,), about 1 on average.

    ``floor`` is added, a fraction of the mean.

    Inputs of zeros, and such with a NaN or an infinity, count the same in all channels.
    """
    rows = [x.reshape(-1, x.shape[-1]) for x in inputs]
    count = max(sum(len(x) for x in rows), 1)
    energy = torch.stack([x.float().square().sum(0) for x in rows]).sum(0) / count
    mean = float(energy.mean())
    if not 0 < mean < float("inf"):
        return torch.ones_like(energy)
    return energy / mean + floor


def powers_for(energy: Tensor) -> Tensor:
    """Returns a power of two for each channel, float32, from its energy (N,)."""
    exponents = energy.log2() / 2
    exponents = (exponents - exponents.mean()) * _POWER
    return torch.exp2(exponents.round().clamp(-MAX_EXPONENT, MAX_EXPONENT))


def smoothing_powers(scaling: ChannelScaling, read: FloatInputs) -> Tensor:
    """Returns powers of two (written,), float32: the fourth root of the size of each channel.

    A token's inputs share one INT8 scale, so loud channels cost the others precision; and a weight of a loud
    channel loses more by rounding than its neighbors do.  Scaling helps against both, and the float model
    computes the same bits as before: see `StageScaling`.  SmoothQuant (arXiv 2211.10438) scales for the
    first, AWQ (arXiv 2306.00978) for the second.
    """
    experts = scaling.writer
    if experts.layout is None:
        return powers_for(scaling.gathered(energy_of(read.inputs)))
    x = torch.cat([x.reshape(-1, x.shape[-1]) for x in read.inputs])
    x = x[torch.linspace(0, len(x) - 1, min(_TOKENS_INSIDE, len(x))).long()]
    inner = experts.layout.inner(parameter(experts.module, experts.layout.weights[0]))
    inputs = (down_inputs(experts.module, experts.layout, inner, e, x) for e in range(len(inner[0])))
    return torch.cat([powers_for(energy_of([own])) for own in inputs])
