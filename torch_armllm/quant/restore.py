"""Restores the float modules of a quantized model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from torch_armllm.quant.attach import detach
from torch_armllm.quant.layers import ModuleSlots
from torch_armllm.quant.methods.calibrated.channel_scaling import AppliedScaling, undo_scalings
from torch_armllm.quant.modules.experts import QuantExperts
from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.quant.modules.tied_embedding import TiedEmbedding

_SCALED = "_armllm_scaled"
"""Attribute of a model: channel scalings of its weights, for `restore`."""


def remember_scalings(model: nn.Module, scaled: Sequence[AppliedScaling]) -> None:
    """Stores in a model which channel scalings its float weights have."""
    if scaled:
        model.__dict__[_SCALED] = list(scaled)


@torch.no_grad()
def restore(model: nn.Module) -> list[str]:
    """Replaces quantized modules by the float modules that they replaced, and takes channel scalings back.

    Returns:
        Names of the modules whose float weights were not kept: their weights are the dequantized integers.
    """
    rounded: list[str] = []
    slots = ModuleSlots(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, TiedEmbedding):
            weight = nn.Parameter(module.dequantize(), requires_grad=False)
            for owner in (module.shell, module.head_shell):
                assert owner is not None
                owner._parameters["weight"] = weight
            slots.replace(module, module.shell)
            rounded.append(name)
    for name, module in list(model.named_modules()):
        if not isinstance(module, (QuantLinear, QuantExperts)):
            continue
        shell = module.shell
        assert shell is not None, f"{name} was not created by quantize()"
        if isinstance(module, QuantLinear):
            if shell.weight is None:
                weight = module.dequantize()
                _set_weight(
                    shell, "weight", weight.t().contiguous() if isinstance(shell, Conv1D) else weight, module
                )
                rounded.append(name)
        elif (layout := module.layout) is not None and getattr(shell, layout.weights[0]) is None:
            for attribute, value in zip(layout.weights, layout.store(*module.dequantize()), strict=True):
                _set_weight(shell, attribute, value, module)
            rounded.append(name)
        if isinstance(module, QuantLinear) and module.bias is not None:
            shell.bias = module.bias
        elif isinstance(module, QuantExperts) and module.layout is not None:
            module.layout.store_biases(shell, module.gate_up_bias, module.down_bias)
        shell.train(module.training)
        slots.replace(module, shell)
    undo_scalings(model.__dict__.pop(_SCALED, []))
    if isinstance(model, PreTrainedModel):
        detach(model)
    return rounded


def _set_weight(shell: nn.Module, name: str, value: Tensor, module: QuantLinear | QuantExperts) -> None:
    setattr(shell, name, nn.Parameter(value.to(module.float_dtype), requires_grad=False))
