"""Sensitivity of a model's predictions to the rounding of each of its layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torch_armllm.quant.layers import Layer
from torch_armllm.quant.methods.calibrated.input_capture import record_inputs
from torch_armllm.quant.methods.calibrated.layerwise import NotByLayersError, Stages
from torch_armllm.quant.methods.calibrated.smoothing import energy_of
from torch_armllm.quant.schemes.base import Scheme, Search
from torch_armllm.quant.schemes.registry import scheme_named

_LENGTH = 256
"""Most tokens of a sequence."""
_TOKENS = 1024
"""Tokens in all."""
_ROWS = 256
"""Rows of a matrix that tell the error of a scheme."""
_MATRICES = 4
"""Experts that tell the error of a scheme."""


@dataclass(frozen=True)
class LayerSensitivity:
    """The cost of rounding one layer.

    Attributes:
        layer: the layer.
        loss: divergence from the float model's predictions in nats a token (Kullback-Leibler) if only this
            layer is rounded, by scheme.
        inputs: id of the tensor that the layer reads: layers that read the same one share it.
    """

    layer: Layer
    loss: dict[str, float]
    inputs: int


class Sensitivity:
    """Measures the divergence that the rounding of each layer causes, one decoder layer after the other.

    Each decoder layer runs with all its weights rounded by the first scheme; its output runs on through the
    float layers after it, up to the logits.  The divergence that comes out is divided between its linear
    layers and experts by what each alone changes in the decoder layer's output, and is scaled by the squared
    errors of the other schemes.

    Attributes:
        stages: number of decoder layers: calls of `run` before `result`.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        schemes: Sequence[str],
        tokens: Tensor,
        on_meta: bool = False,
    ) -> None:
        """Prepares to run the model.

        Args:
            model: the float model.
            layers: the layers to quantize.
            schemes: names of the schemes; the weights are rounded by the first.
            tokens: token ids (sequences, length), of which about a thousand are used.
            on_meta: decoder layers are on the meta device, and get their weights one after the other.

        Raises:
            NotByLayersError: the decoder layers do not run one after the other.
        """
        tokens = tokens[:, :_LENGTH]
        tokens = tokens[: max(1, _TOKENS // tokens.shape[1])]
        self._stages = Stages(model, tokens, 1, on_meta)
        self.stages = len(self._stages.modules)
        if self._stages.whole is not None:
            raise NotByLayersError(
                f"the sensitivity of {type(model).__name__}'s layers cannot be measured "
                f"({self._stages.whole}): choose schemes with overrides instead of bits"
            )
        stage_of = self._stages.stage_indices(layers)
        self._schemes = [scheme_named(name) for name in schemes]
        self._layers = [
            [x for x in layers if stage_of.get(x.name) == stage] for stage in range(len(self._stages.modules))
        ]
        self._float = self._stages.inputs()
        self._rounded: list[list[Tensor]] = []
        self._measured: list[list[tuple[LayerSensitivity, float]]] = []

    @torch.no_grad()
    def run(self) -> None:
        """Runs the next decoder layer, whose weights must be in memory."""
        stage = len(self._rounded)
        layers = self._layers[stage]
        after: list[Tensor] = []
        inputs = record_inputs(layers, lambda: after.extend(self._stages.run(stage, self._float)))
        self._rounded = [self._stages.run(stage, states) for states in self._rounded]
        originals, rounded, measured = {}, {}, []
        for layer in layers:
            entry = inputs.get(layer.name)
            energy = energy_of(entry.inputs) if entry is not None and entry.inputs else None
            originals[layer.name] = [weight.detach().clone() for weight in layer.weights()]
            measured.append(LayerSensitivity(layer, self._relative_errors(layer, energy), id(entry)))
            _round(layer, self._schemes[0], energy)
            rounded[layer.name] = [weight.detach().clone() for weight in layer.weights()]
        self._rounded.append(self._stages.run(stage, self._float))
        for layer in layers:
            _store(layer, originals[layer.name])
        shares = []
        for layer in layers:
            with _weights(layer, rounded[layer.name], originals[layer.name]):
                shares.append(_distance(self._stages.run(stage, self._float), after))
        total = sum(shares) or 1.0
        self._measured.append(list(zip(measured, (share / total for share in shares), strict=True)))
        self._float = after

    @torch.no_grad()
    def result(self) -> list[LayerSensitivity]:
        """Returns the sensitivities; the modules after the decoder layers must be in memory."""
        divergences = [0.0] * len(self._rounded)
        tokens = 0
        for batch, states in enumerate(self._float):
            expected = self._stages.logits(batch, states).float().log_softmax(-1)
            tokens += expected.shape[0] * expected.shape[1]
            for stage, rounded in enumerate(self._rounded):
                actual = self._stages.logits(batch, rounded[batch]).float().log_softmax(-1)
                divergences[stage] += float((expected.exp() * (expected - actual)).sum())
        return [
            LayerSensitivity(
                x.layer, {name: loss * share * kl / tokens for name, loss in x.loss.items()}, x.inputs
            )
            for kl, measured in zip(divergences, self._measured, strict=True)
            for x, share in measured
        ]

    def _relative_errors(self, layer: Layer, energy: Tensor | None) -> dict[str, float]:
        """Returns the squared error of each scheme, as a multiple of that of the first."""
        errors = [0.0] * len(self._schemes)
        for matrix, weights in _sample(layer, energy):
            for index, scheme in enumerate(self._schemes):
                quantized, _ = scheme.quantize(matrix, Search(weights))
                error = (scheme.dequantize(quantized) - matrix.float()).square()
                errors[index] += float((error if weights is None else error * weights).sum())
        return {x.name: error / (errors[0] or 1.0) for x, error in zip(self._schemes, errors, strict=True)}


def _sample(layer: Layer, energy: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yields some rows of some of a layer's matrices, with the energies of their inputs if known."""
    for matrices, weights in zip(layer.matrices(), _energies(layer, energy), strict=True):
        for matrix in matrices[:_MATRICES]:
            yield matrix[:: max(1, len(matrix) // _ROWS)], weights


def _energies(layer: Layer, energy: Tensor | None) -> list[Tensor | None]:
    """Returns the energies of the inputs by role; those of experts' down projections are not measured."""
    roles = len(layer.matrices())
    return [energy] * roles if layer.layout is None else [*[energy] * (roles - 1), None]


def _round(layer: Layer, scheme: Scheme, energy: Tensor | None) -> None:
    """Rounds a layer's weights in place."""
    for matrices, weights in zip(layer.matrices(), _energies(layer, energy), strict=True):
        for matrix in matrices:
            quantized, _ = scheme.quantize(matrix, Search(weights))
            matrix.copy_(scheme.dequantize(quantized))


def _store(layer: Layer, values: Sequence[Tensor]) -> None:
    for weight, value in zip(layer.weights(), values, strict=True):
        weight.detach().copy_(value)


@contextmanager
def _weights(layer: Layer, values: Sequence[Tensor], before: Sequence[Tensor]) -> Iterator[None]:
    """Gives a layer other weights, and those from ``before`` at the end."""
    try:
        _store(layer, values)
        yield
    finally:
        _store(layer, before)


def _distance(states: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Returns Σ (x − y)² / mean y² over tokens and channels: loud channels count like the others."""
    x, y = (torch.cat([part.flatten(0, -2).float() for part in parts]) for parts in (states, expected))
    size = y.square().mean(0)
    return float(((x - y).square().mean(0) / size.clamp_min(torch.finfo(torch.float32).tiny)).sum())
