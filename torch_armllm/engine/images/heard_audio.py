"""Sound that a processor cuts off without a word."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_END = 10
"""Part of a second at the end of a clip that has to change what a processor makes of it."""


class HeardAudio:
    """Finds clips whose ends a processor leaves out, as those of models of 30 seconds do.

    Args:
        name: of the model, for errors.
        rate: samples a second.
    """

    def __init__(self, name: str, rate: int) -> None:
        self._name = name
        self._rate = rate
        self._most = 0  # samples of the longest clip that was read to its end

    def check(
        self,
        items: Mapping[str, Sequence[Any]],
        inputs: Mapping[str, Any],
        read: Callable[[Mapping[str, Sequence[Any]]], Mapping[str, Any]],
    ) -> None:
        """Checks that other samples at the end of the longest clip would give other inputs.

        Args:
            items: of a prompt, by modality.
            inputs: of the model.
            read: returns those of other items.

        Raises:
            ValueError: they would not.
        """
        clips = list(items.get("audio", ()))
        at = max(range(len(clips)), key=lambda number: len(clips[number]), default=0)
        if not clips or len(clips[at]) <= self._most:
            return
        count = min(len(clips[at]), self._rate // _END)
        clip = clips[at].copy()
        clip[-count:] += np.random.default_rng(0).uniform(-0.2, 0.2, count).astype(np.float32)
        others = read({**items, "audio": [*clips[:at], clip, *clips[at + 1 :]]})
        if not any(_differs(inputs[name], others.get(name)) for name in inputs):
            raise ValueError(
                f"the processor of {self._name} leaves out the end of an audio clip of "
                f"{len(clip) / self._rate:g} seconds: send shorter clips"
            )
        self._most = len(clip)


def _differs(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return not (isinstance(other, Tensor) and one.shape == other.shape and torch.equal(one, other))
    if isinstance(one, (list, tuple)):
        lengths = len(other) if isinstance(other, (list, tuple)) else -1
        return len(one) != lengths or any(map(_differs, one, other))
    return False
