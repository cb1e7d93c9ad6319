"""Marks a model as quantized for transformers, so that it can be saved, and removes the mark."""

from __future__ import annotations

from typing import Any

from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from torch_armllm.hf.names import METHOD
from torch_armllm.quant.config import ArmInt4Config
from torch_armllm.quant.skeleton import describe_modules, forget_ties


def attach(model: Any, config: ArmInt4Config, quantizer: Any | None = None) -> None:
    """Tells transformers that a model is quantized, so that it can be saved."""
    config.modules = describe_modules(model)
    model.hf_quantizer = quantizer or AUTO_QUANTIZER_MAPPING[METHOD](config)
    model.config.quantization_config = config
    model.is_quantized = True
    model.quantization_method = config.quant_method
    forget_ties(model)
    model.tie_weights = _stay_tied


def _stay_tied(*args: Any, **kwargs: Any) -> None:
    """Does nothing: tied modules share their integers; transformers would look for float weights to tie."""


def detach(model: Any) -> None:
    """Reverts `attach`."""
    for owner, names in (
        (model, ("hf_quantizer", "is_quantized", "quantization_method", "tie_weights")),
        (model.config, ("quantization_config", "_is_quantized")),
    ):
        for name in names:
            owner.__dict__.pop(name, None)
    if hasattr(model, "get_expanded_tied_weights_keys"):
        model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=False)
