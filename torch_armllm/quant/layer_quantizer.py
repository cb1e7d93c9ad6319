"""Replaces the layers of a model by quantized ones: packs each, and commits them when nothing can fail."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from torch_armllm.quant.layers import Layer, ModuleSlots
from torch_armllm.quant.methods.base import Method
from torch_armllm.quant.modules.experts import QuantExperts
from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.quant.replacement import Replacement, make_replacement
from torch_armllm.quant.report import LayerRecord
from torch_armllm.quant.schemes.base import Scheme
from torch_armllm.quant.spill_file import SpillFile
from torch_armllm.system.allocator import release_free_memory


class LayerQuantizer:
    """Quantizes layers one by one in two steps.

    `run` packs a layer and leaves the model as it is; `commit` puts the packed module into the model and
    frees the float weights.  The caller chooses to commit a layer immediately, after its block, or after
    all layers.
    """

    def __init__(
        self,
        model: nn.Module,
        schemes: Mapping[str, Scheme],
        method: Method,
        keep_original: bool = False,
        spill: SpillFile | None = None,
        wide: Collection[str] = (),
    ) -> None:
        """Prepares to quantize layers of a model.

        Args:
            model: the model that the layers belong to.
            schemes: scheme by layer name.
            method: chooses the integers.
            keep_original: keep the float weights after `commit`, for `restore`.
            spill: holds packed weights until `commit`; by default most of them are in a temporary file.
            wide: names of the linear layers with INT16 activations.
        """
        self._model = model
        self._schemes = schemes
        self._method = method
        self._keep_original = keep_original
        self._wide = frozenset(wide)
        self._spill = SpillFile() if spill is None else spill
        self._pending: dict[str, Replacement] = {}
        self._slots: ModuleSlots | None = None

    def run(self, layer: Layer) -> LayerRecord:
        """Packs a layer; the model stays as it is.

        Raises:
            ValueError: a weight is not finite.
        """
        scheme = self._schemes[layer.name]
        replacement = make_replacement(
            self._model, layer, scheme, self._method, self._keep_original, self._spill
        )
        record = self.add(layer, replacement)
        self._method.on_packed(layer, replacement.module, self._spill)
        release_free_memory()
        return record

    def add(self, layer: Layer, replacement: Replacement) -> LayerRecord:
        """Adds a replacement that was packed elsewhere, for `commit`."""
        if layer.name in self._wide:
            assert isinstance(replacement.module, QuantLinear)
            replacement.module.digits = 2
        self._pending[layer.name] = replacement
        return replacement.record(layer)

    def commit(self, layer: Layer) -> QuantLinear | QuantExperts:
        """Puts a layer's packed module into the model, frees the float weights and returns the module."""
        if self._slots is None:
            self._slots = ModuleSlots(self._model)
        replacement = self._pending.pop(layer.name)
        module, sharer = replacement.module, replacement.sharer
        self._slots.replace(layer.module, module)
        if not replacement.keep:
            for name in layer.weight_names:
                setattr(layer.module, name, None)
        if sharer is not None:
            self._slots.replace(sharer.shell, sharer)
            sharer.shell._parameters["weight"] = None
        self._spill.load(module)
        if sharer is not None:
            assert isinstance(module, QuantLinear)
            self._spill.load(sharer)
            sharer.share(module)
        release_free_memory()
        return module
