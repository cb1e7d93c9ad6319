"""Inspects which layers of a model are packed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from torch_armllm.hf.output_layer import output_layer_of
from torch_armllm.quant.layers import find_layers, is_up_projection
from torch_armllm.quant.modules.experts import QuantExperts
from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.quant.modules.tied_embedding import TiedEmbedding
from torch_armllm.quant.report import LayerRecord


def is_packed(model: nn.Module) -> bool:
    """True if a model holds weights that this package quantized."""
    return any(isinstance(module, (QuantLinear, QuantExperts)) for module in model.modules())


def describe(model: nn.Module, reason: str) -> list[LayerRecord]:
    """Returns the records of all layers of a model.

    Args:
        model: a transformers model on the CPU.
        reason: the reason for layers that are not packed.
    """
    packed = [
        _packed(model, name, module)
        for name, module in model.named_modules()
        if isinstance(module, (QuantLinear, QuantExperts))
    ]
    return packed + [
        LayerRecord.unquantized(replace(layer, reason=layer.reason or reason)) for layer in find_layers(model)
    ]


def float_bytes(model: Any, size: int) -> int:
    """Returns the bytes of a model of ``size`` bytes if its packed weights were floats again."""
    head = output_layer_of(model)
    for module in model.modules():
        if isinstance(module, (QuantLinear, QuantExperts)):
            size -= sum(buffer.nbytes for buffer in module.buffers())
            tied = module is head and getattr(model.config.get_text_config(), "tie_word_embeddings", False)
            size += 0 if tied else _weights(module) * module.float_dtype.itemsize
        elif isinstance(module, TiedEmbedding):
            size += module.rest.numel() * module.float_dtype.itemsize - module.rest.nbytes
    return size


def _weights(module: QuantLinear | QuantExperts) -> int:
    if isinstance(module, QuantLinear):
        return module.in_features * module.out_features
    matrices = 3 if module.gated else 2
    return matrices * module.num_experts * module.hidden_dim * module.intermediate_dim


def _packed(model: Any, name: str, module: QuantLinear | QuantExperts) -> LayerRecord:
    if isinstance(module, QuantExperts):
        kind, op = "experts", "int4_moe"
    else:
        parent, _, attribute = name.rpartition(".")
        latent = is_up_projection(model.get_submodule(parent), attribute)
        kind = "head" if module is output_layer_of(model) else "latent" if latent else "linear"
        kind, op = "blocks" if module.blocks > 1 else kind, module.op
    count = _weights(module)
    after = sum(buffer.nbytes for buffer in module.buffers())
    return LayerRecord(
        name, kind, op, module.scheme, count, count * module.float_dtype.itemsize, after, module.error
    )
