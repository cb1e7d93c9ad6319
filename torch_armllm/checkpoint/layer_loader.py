"""Quantization layer by layer while transformers reads a checkpoint."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from torch_armllm.checkpoint.incoming import Incoming, check_incoming
from torch_armllm.quant.config import ArmInt4Config
from torch_armllm.quant.layers import Layer, check_finite
from torch_armllm.quant.methods.registry import make_method
from torch_armllm.quant.modules.experts import QuantExperts
from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.quant.quantization import Quantization
from torch_armllm.quant.report import LayerRecord
from torch_armllm.quant.skeleton import placeholder
from torch_armllm.quant.spill_file import SpillFile
from torch_armllm.system.allocator import release_free_memory


class LayerLoader:
    """Receives the weights of a model on the meta device one by one, and packs each complete layer.

    `finish` puts the packed modules into the model: until then, all other tensors are loaded into the float
    modules.
    """

    def __init__(self, model: nn.Module, config: ArmInt4Config) -> None:
        self._run = run = Quantization(model, config.recipe, loading=True, spill=SpillFile(in_memory=None))
        run.method = make_method(config.recipe, model, run.selected)
        self._layer_of: dict[str, Layer] = {}
        self._error: ValueError | None = None
        tied = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        for layer in run.selected:
            if not any(id(weight) in tied for weight in layer.weights()):
                self._layer_of.update({f"{layer.name}.{name}": layer for name in layer.weight_names})

    def wants(self, name: str) -> bool:
        """True if `take` handles the parameter."""
        return name in self._layer_of

    @torch.no_grad()
    def take(self, name: str, weight: Tensor) -> None:
        """Receives a weight; `finish` raises its errors, since transformers would hide them in a log."""
        layer = self._layer_of[name]
        module, attribute = layer.module, name.rpartition(".")[2]
        module._is_hf_initialized = True  # type: ignore[assignment]
        expected = module.get_parameter(attribute).shape
        try:
            if self._error is not None:
                raise self._error
            if weight.shape != expected:
                raise ValueError(
                    f"{name} has the shape {tuple(weight.shape)} in the checkpoint and {tuple(expected)} in "
                    "the model: config.json belongs to another checkpoint"
                )
            module._parameters[attribute] = nn.Parameter(weight, requires_grad=False)
            if any(part.is_meta for part in layer.weights()):
                return
            check_finite([layer])
            self._run.pack(layer)
        except ValueError as error:
            self._error = error
        for part in layer.weight_names:
            module._parameters[part] = placeholder(module.get_parameter(part))
        release_free_memory()

    @torch.no_grad()
    def finish(self) -> list[LayerRecord]:
        """Puts the packed modules into the model, and quantizes a head that is tied to an embedding.

        Raises:
            ValueError: a weight is not finite or has the wrong shape, or a quantization error is an outlier.
        """
        if self._error is not None:
            raise self._error
        run = self._run
        run.refuse_outliers()
        for layer in run.layers:
            if layer.name in run.finished:
                _take_biases(run.commit(layer), layer)
            else:
                check_finite([layer])
                run.replace(layer, SpillFile())  # with the float weights, all of a large head is in memory
        run.refuse_outliers()
        return run.records


def _take_biases(new: QuantLinear | QuantExperts, layer: Layer) -> None:
    """Copies the biases of a layer, which were not loaded when its weights were packed."""
    if isinstance(new, QuantLinear):
        biases: dict[str, Any] = {"bias": layer.module.bias}
    else:
        assert layer.layout is not None
        biases = dict(zip(("gate_up_bias", "down_bias"), layer.layout.biases(layer.module), strict=True))
    for name, bias in biases.items():
        new.register_parameter(name, None if bias is None else nn.Parameter(bias, requires_grad=False))


def refuse_missing(model: Any) -> None:
    """Raises ValueError if no file has a parameter or a saved buffer."""
    stored = set(model.state_dict())
    empty = [
        name
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
        if name in stored and not getattr(tensor, "_is_hf_initialized", False)
    ]
    source = str(getattr(model.config, "name_or_path", "")) or "the checkpoint"
    check_incoming(Incoming(source, type(model).__name__, missing=empty))
