"""The bytes of a quantized model's files, before anything is quantized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from torch_armllm.quant.layers import Layer
from torch_armllm.quant.modules.tied_embedding import can_share
from torch_armllm.quant.packing import empty_panels
from torch_armllm.quant.schemes.base import Scheme

_SETTINGS = 2048
"""Bytes of ``config.json`` and ``generation_config.json``, apart from what they say of modules."""
_ENTRIES = 320
"""Bytes that describe a tensor, without its name: in its file's header, the index and ``config.json``."""
_NAMED = 5
"""Times that its name is written there."""


def packed_bytes(layer: Layer, scheme: str) -> int:
    """Returns the packed size of a layer's matrices."""
    total = 0
    for matrices in layer.matrices():
        rows, columns = matrices[0].shape
        total += empty_panels((len(matrices),), rows, columns, scheme).nbytes
    return total


def saved_bytes(
    model: nn.Module, layers: Sequence[Layer], schemes: Mapping[str, Scheme], without: Sequence[Layer] = ()
) -> int:
    """Returns the bytes of a model's files once it is quantized: an upper bound, a few kilobytes above.

    Args:
        model: the float model; it may be on the meta device.
        layers: its layers.
        schemes: the schemes of the layers to quantize, by name.
        without: layers whose packed weights are not counted.
    """
    quantized = [x for x in layers if x.name in schemes]
    done = {id(weight) for x in quantized for weight in x.weights()}
    total = _SETTINGS
    for name, tensor in model.state_dict(keep_vars=True).items():
        total += _ENTRIES + _NAMED * len(name)
        if id(tensor) not in done:
            done.add(id(tensor))
            # a norm of 1 + weight may become float32
            total += tensor.numel() * (4 if tensor.dim() == 1 else tensor.element_size())
    left_out = {x.name for x in without}
    for layer in quantized:
        if layer.name not in left_out:
            total += packed_bytes(layer, schemes[layer.name].name)
        total += _embedding_bytes(model, layer, schemes[layer.name].name)
    return total


def _embedding_bytes(model: nn.Module, layer: Layer, scheme: str) -> int:
    """Returns what an embedding that is tied to a quantized layer takes: see `TiedEmbedding`."""
    own = {id(weight) for weight in layer.weights()}
    tied = next((m for m in model.modules() if isinstance(m, nn.Embedding) and id(m.weight) in own), None)
    if tied is None:
        return 0
    return tied.weight.numel() if can_share(tied, scheme) else tied.weight.nbytes
