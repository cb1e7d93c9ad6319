"""A recorded call of a decoder layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class RecordedCall:
    """A call of a decoder layer that was recorded, to be made again with other hidden states.

    Attributes:
        module: the decoder layer.
        states: its hidden states (sequences, length, hidden size).
        args, kwargs: its other arguments.
        output: what it returned; None when that is no longer needed.
    """

    module: nn.Module
    states: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None

    def same_context(self, other: RecordedCall) -> bool:
        """True if both calls have the same masks, positions and other arguments except hidden states."""
        mine, theirs = self.context(), other.context()
        return len(mine) == len(theirs) and all(map(_equal, mine, theirs))

    def context(self) -> list[Any]:
        """Returns all arguments except hidden states, as a flat list."""
        return _leaves((self.args, [self.kwargs[name] for name in sorted(self.kwargs)]))

    @property
    def stateless(self) -> bool:
        """True if only hidden states carry state from layer to layer."""
        return all(_plain(leaf) for leaf in self.context())

    def takes_from(self, output: Any) -> bool:
        """True if an argument other than the hidden states is a part of what the layer before returned."""
        others = {id(leaf) for leaf in _leaves(output)[1:] if isinstance(leaf, Tensor)}
        return any(id(leaf) in others for leaf in self.context())

    def __call__(self, states: Tensor) -> Tensor:
        """Calls the decoder layer again with other hidden states, and returns its hidden states."""
        return first_of(self.module(states, *self.args, **self.kwargs))

    def cut(self, sequences: int) -> RecordedCall:
        """Returns the call for a batch of fewer sequences, as the last batch may be."""
        before = len(self.states)
        if sequences == before:
            return self

        def less(value: Any) -> Any:
            if isinstance(value, Tensor) and value.dim() and value.shape[0] == before:
                return value[:sequences]
            if isinstance(value, (tuple, list)):
                return type(value)(less(part) for part in value)
            return value

        named = {name: less(value) for name, value in self.kwargs.items()}
        return RecordedCall(self.module, self.states[:sequences], less(self.args), named)


def first_of(output: Any) -> Tensor:
    """Returns the hidden states of a decoder layer's output: the tensor, or the first of a tuple."""
    first = output[0] if isinstance(output, (tuple, list)) else output
    assert isinstance(first, Tensor), f"a decoder layer returned {type(output).__name__}"
    return first


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [leaf for part in value for leaf in _leaves(part)]
    return [value]


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, (Tensor, bool, int, float, str)) or value == {}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return one is other or one == other
