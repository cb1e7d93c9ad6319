"""The quantization of one model: the scheme of each layer, and its replacement by a packed one."""

from __future__ import annotations

from torch import nn

from torch_armllm.quant.layers import Layer, ModuleSlots, find_layers
from torch_armllm.quant.methods.base import CALIBRATED, Method
from torch_armllm.quant.modules.experts import QuantExperts
from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.quant.outliers import refuse_outliers
from torch_armllm.quant.recipe import Recipe, fits
from torch_armllm.quant.replacement import Replacement, make_replacement
from torch_armllm.quant.report import LayerRecord
from torch_armllm.quant.schemes.base import Scheme
from torch_armllm.quant.spill_file import SpillFile
from torch_armllm.system.allocator import release_free_memory


class Quantization:
    """Quantizes the layers of one model, one by one, by the schemes that a recipe assigns.

    `pack` packs a layer and leaves the model as it is; `commit` puts the packed module into the model and
    frees the float weights.  The caller chooses to commit a layer immediately, after its block, or after all
    layers.

    Attributes:
        model: the model.
        recipe: assigns the schemes: see `assign`.
        layers: the layers with a weight matrix, unquantized ones with the reason.
        schemes: schemes of the layers to quantize, by name.
        wide: names of the layers whose activations are INT16.
        method: chooses the integers; the caller sets it before the first layer.
        finished: records of the layers that are done, by name.
    """

    recipe: Recipe
    schemes: dict[str, Scheme]
    wide: set[str]
    method: Method

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        *,
        loading: bool = False,
        keep_original: bool = False,
        spill: SpillFile | None = None,
    ) -> None:
        """Finds the layers of a model, and assigns their schemes.

        Args:
            model: a transformers model on the CPU.
            recipe: its recipe.
            loading: the model is still on the meta device.
            keep_original: keep the float weights after `commit`, for `restore`.
            spill: holds packed weights until `commit`; by default most of them are in a temporary file.

        Raises:
            ValueError: a pattern fits no layer, or a weight cannot be quantized: see `find_layers`.
        """
        self.model = model
        self.layers = find_layers(model, recipe.ignore, loading)
        self.assign(recipe)
        self.finished: dict[str, LayerRecord] = {}
        self._keep_original = keep_original
        self._spill = SpillFile() if spill is None else spill
        self._pending: dict[str, Replacement] = {}
        self._slots: ModuleSlots | None = None

    def assign(self, recipe: Recipe) -> None:
        """Assigns the schemes of a recipe, and the layers with INT16 activations.

        Raises:
            ValueError: a pattern fits no layer that can have what it asks for.
        """
        self.recipe = recipe
        self.layers, self.schemes = recipe.assign(self.layers)
        able = [layer for layer in self.selected if layer.kind in ("linear", "head")]
        self.wide = set()
        for pattern in recipe.int16_activations:
            fitting = {layer.name for layer in able if fits(layer, pattern)}
            if not fitting:
                raise ValueError(
                    f"int16_activations: {pattern!r} fits no quantized linear layer of the model; experts "
                    "and up-projections of latents have INT8 activations only"
                )
            self.wide |= fitting

    @property
    def selected(self) -> list[Layer]:
        """The layers to quantize."""
        return [layer for layer in self.layers if layer.name in self.schemes]

    @property
    def records(self) -> list[LayerRecord]:
        """A record of each layer, in the model's order; all layers to quantize must be done."""
        return [self.finished.get(layer.name) or LayerRecord.unquantized(layer) for layer in self.layers]

    @property
    def calibrated(self) -> bool:
        """True if the method calibrates."""
        return self.recipe.method in CALIBRATED

    def pack(self, layer: Layer, spill: SpillFile | None = None) -> None:
        """Packs a layer, into the run's own ``spill`` by default; the model stays as it is.

        Raises:
            ValueError: a weight is not finite.
        """
        scheme, spill = self.schemes[layer.name], self._spill if spill is None else spill
        replacement = make_replacement(self.model, layer, scheme, self.method, self._keep_original, spill)
        self.add(layer, replacement)
        self.method.on_packed(layer, replacement.module, spill)
        release_free_memory()

    def add(self, layer: Layer, replacement: Replacement) -> None:
        """Adds a replacement that was packed elsewhere, for `commit`."""
        if layer.name in self.wide:
            assert isinstance(replacement.module, QuantLinear)
            replacement.module.digits = 2
        self._pending[layer.name] = replacement
        self.finished[layer.name] = replacement.record(layer)

    def commit(self, layer: Layer) -> QuantLinear | QuantExperts:
        """Puts a layer's packed module into the model, frees the float weights and returns the module."""
        if self._slots is None:
            self._slots = ModuleSlots(self.model)
        replacement = self._pending.pop(layer.name)
        module, sharer, spill = replacement.module, replacement.sharer, replacement.spill
        self._slots.replace(layer.module, module)
        if not replacement.keep:
            for name in layer.weight_names:
                setattr(layer.module, name, None)
        if spill is not None:
            spill.load(module)
        if sharer is not None:
            assert isinstance(module, QuantLinear) and spill is not None
            self._slots.replace(sharer.shell, sharer)
            sharer.shell._parameters["weight"] = None
            spill.load(sharer)
            sharer.share(module)
        release_free_memory()
        return module

    def replace(self, layer: Layer, spill: SpillFile | None = None) -> LayerRecord:
        """Packs and commits a layer, or leaves it if it is not to be quantized; returns its record."""
        if layer.reason is None:
            self.pack(layer, spill)
            self.commit(layer)
        else:
            self.finished[layer.name] = LayerRecord.unquantized(layer)
        return self.finished[layer.name]

    def refuse_outliers(self, state: str = "nothing was changed") -> None:
        """Raises ValueError for outliers among the layers that are done, unless the recipe allows them.

        Args:
            state: the state that the error leaves, for the message.
        """
        if not self.recipe.allow_outliers:
            refuse_outliers(list(self.finished.values()), state, self.calibrated)
