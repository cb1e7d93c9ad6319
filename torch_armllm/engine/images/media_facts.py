"""Findings of the trial of a model that takes images, video or audio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor


@dataclass(frozen=True)
class Feature:
    """Rows that a model adds to the hidden states of some tokens (DeepStack).

    Attributes:
        path: argument of the decoder that holds them, and where in it.
        layer: the layer after which they are added; -1: to the embeddings.
    """

    path: tuple[Any, ...]
    layer: int

    def of(self, arguments: Mapping[str, Any]) -> Tensor | None:
        """Returns the rows ``(n, hidden)`` of a call's arguments; None: it adds none."""
        found: Any = arguments
        for step in self.path:
            if found is None or (isinstance(found, Mapping) and step not in found):
                return None
            found = found[step]
        return found if isinstance(found, Tensor) else None


@dataclass(frozen=True)
class MediaFacts:
    """Findings of the trial of a model that takes images, video or audio.

    Attributes:
        modalities: that it takes.
        reasons: why it takes no others, by modality.
        is_whole: True if the model takes what its processor makes; False: its base model does.
        axes: numbers of each token by which it rotates (M-RoPE); 0: tokens have one position each.
        has_places: True if their places are given before these numbers.
        first: position of the first token of a prompt, where tokens have one position each.
        looks_ahead: which layers let tokens attend to later ones of their item: none, all, or those with
            windows.
        features: what is added to the hidden states of some tokens, by layers.
        mask: argument of the decoder that tells these tokens; empty: they are those that are given.
        factor: by which the decoder multiplies the embeddings that it is given.
        token: id that tokens of items have where layers embed tokens too.
        known: arguments of the decoder that are accounted for, beside those of every one.
    """

    modalities: tuple[str, ...]
    reasons: Mapping[str, str] = field(default_factory=dict)
    is_whole: bool = False
    axes: int = 0
    has_places: bool = False
    first: int = 0
    looks_ahead: Literal["", "all", "windows"] = ""
    features: tuple[Feature, ...] = ()
    mask: str = ""
    factor: float = 1.0
    token: int = 0
    known: frozenset[str] = frozenset()

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers after which features are added, in order."""
        return tuple(sorted({each.layer for each in self.features} - {-1}))
