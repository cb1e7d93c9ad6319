"""Activation functions of classifiers, by what their configuration says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Activation = Callable[[Tensor], Tensor]


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


def _none(logits: Tensor) -> Tensor:
    return logits


_NAMED: dict[str, Activation] = {"Sigmoid": torch.sigmoid, "Identity": _none, "Softmax": _softmax}
_BY_PROBLEM: dict[str, Activation] = {
    "regression": _none,
    "single_label_classification": _softmax,
    "multi_label_classification": torch.sigmoid,
}


def activation_of(config: Any) -> Activation:
    """Returns the function from a classifier's logits to its results, as vLLM chooses it.

    Cross-encoders of sentence-transformers name it; else the kind of problem decides; else the number of
    labels: sigmoid for one, softmax for several.

    Args:
        config: the model's configuration.

    Raises:
        ValueError: the configuration names a function that is not known.
    """
    settings = getattr(config, "sentence_transformers", None)
    name = settings.get("activation_fn") if isinstance(settings, dict) else None
    name = name or getattr(config, "sbert_ce_default_activation_function", None)
    if name:
        short = str(name).rpartition(".")[2]
        if short not in _NAMED:
            raise ValueError(f"activation_fn of the model is {name!r}; {', '.join(_NAMED)} are supported")
        return _NAMED[short]
    if (problem := getattr(config, "problem_type", None)) in _BY_PROBLEM:
        return _BY_PROBLEM[problem]
    return torch.sigmoid if config.num_labels == 1 else _softmax
