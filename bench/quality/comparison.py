"""Comparison of quantized models with the float model that they were made of."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torch_armllm
from bench.quality.divergence import Divergence
from bench.quality.results import Results, Row
from bench.quality.torch_peers import TorchPeer
from torch_armllm import Recipe
from torch_armllm.evaluation.variant import int16_layers
from torch_armllm.llm.calibration_text import written_tokens
from torch_armllm.quant.methods.base import CALIBRATED
from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.quant.scale_tuning import tune_scales

TUNED, UNROTATED = "tuned", "unrotated"
TUNING_TEXTS = 128
_TUNING_SEED = 1000


class Comparison:
    """A float model, the tokens to measure on and its logits for them.

    Attributes:
        model: the float model.
        tokens: ids (texts, length) to measure on.
        calibration: ids (texts, length) to calibrate with.
        weights: number of parameters.
        expected: float logits (length, vocabulary) of each text.
        results: rows so far.
    """

    def __init__(
        self, name: str, model: Any, tokens: Tensor, calibration: Tensor, file: Path | None = None
    ) -> None:
        self.model, self.tokens, self.calibration = model, tokens, calibration
        self.weights = sum(p.numel() for p in model.parameters())
        self.expected = list(logits(model, tokens))
        self.results = Results(name, len(tokens), tokens.numel(), len(calibration), file)
        self.results.begin()
        self.add("floats", "floats", 32, None, self.expected)

    def add(
        self, name: str, series: str, bits: float | None, size: int | None, actual: Iterable[Tensor]
    ) -> None:
        """Adds the row of a model's logits; ``size`` is in bytes."""
        divergence = Divergence()
        for expected, found, row in zip(self.expected, actual, self.tokens, strict=True):
            divergence.add(expected, found, row)
        file = None if size is None else 8 * size / self.weights
        self.results.add(Row.of(name, series, bits, file, divergence))

    def copy(self) -> Any:
        """Returns a copy of the float model."""
        model = type(self.model)(copy.deepcopy(self.model.config)).eval()
        model.load_state_dict(self.model.state_dict())
        return model

    def ours(self, scheme: str, method: str, *options: str) -> None:
        """Quantizes a copy and measures it with INT8 and with float activations.

        Args:
            scheme: one for all layers, or the mean bits a weight that their schemes are chosen for.
            method: the rounding method.
            options: ``a16`` or ``a16=LAYERS``: all linear layers and the head, or those of a kind or a
                pattern, have INT16 activations; ``tuned``: row scales are tuned on `TUNING_TEXTS` texts that
                the float model writes; ``unrotated``: inputs of linear layers are not rotated.

        Raises:
            ValueError: an option is unknown, or a pattern fits no layer.
        """
        wide = [_layers(text) for text in options if text not in (TUNED, UNROTATED)]
        model = self.copy()
        mixed = scheme.replace(".", "", 1).isdecimal()
        recipe = Recipe(bits=float(scheme), method=method) if mixed else Recipe(scheme, method=method)
        if wide:
            recipe = replace(recipe, int16_activations=wide)
            where = "" if "*" in wide else f" in {' and '.join(wide)}"
            method = f"{method}, INT16 activations{where}"
        if UNROTATED in options:
            recipe = replace(recipe, rotate=False)
            method = f"{method}, not rotated"
        calibrates = mixed or recipe.method in CALIBRATED
        calibrated = {"calibration": self.calibration} if calibrates else {}
        if TUNED in options:
            torch_armllm.quantize(model, recipe, progress=False, **calibrated)
            tune_scales(model, self.model, self.own_texts, progress=False)
            torch_armllm.patch(model)
            method = f"{method}, tuned"
        else:
            torch_armllm.patch(model, recipe, progress=False, **calibrated)
        scheme = f"{scheme} bits" if mixed else scheme
        size = sum({id(t): t.nbytes for t in (*model.parameters(), *model.buffers())}.values())
        self.add(f"{scheme}, {method}", f"ours, {method}", _bits(model), size, logits(model, self.tokens))
        torch_armllm.unpatch(model)
        name = f"{scheme}, {method}, floats"
        self.add(name, f"ours, {method}, floats", None, None, logits(model, self.tokens))

    @functools.cached_property
    def own_texts(self) -> Tensor:
        """Token ids (texts, length) that the float model writes, for tuning."""
        return written_tokens(self.copy().bfloat16(), TUNING_TEXTS, self.tokens.shape[1], _TUNING_SEED)

    def torch_peer(self, peer: TorchPeer) -> None:
        """Quantizes a copy by a peer and measures it."""
        model = self.copy()
        bits = peer.apply(model)
        self.add(peer.name, peer.series, bits, None, logits(model, self.tokens))


def _layers(text: str) -> str:
    pattern = int16_layers(text)
    if pattern is None:
        raise ValueError(f"options are a16, a16=LAYERS, {TUNED} and {UNROTATED}, not {text!r}")
    return pattern


def _bits(model: Any) -> float:
    """Returns bits per weight of the quantized linear layers as packed, without the output head."""
    head = model.get_output_embeddings()
    packed = [m for m in model.modules() if isinstance(m, QuantLinear) and m is not head]
    weights = sum(m.in_features * m.out_features for m in packed)
    return 8 * sum(m.weight_packed.nbytes for m in packed) / weights


@torch.no_grad()
def logits(model: Any, tokens: Tensor) -> Iterable[Tensor]:
    """Yields logits (length, vocabulary) of each row of tokens."""
    for row in tokens:
        yield model(row[None]).logits[0]
