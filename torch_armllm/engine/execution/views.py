"""Views of a buffer by size."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class Views:
    """Views of buffers, which are kept: a running batch needs those of the same size in every step.

    Args:
        capacity: largest size.
        make: returns the views of a size.
    """

    def __init__(self, capacity: int, make: Callable[[int], tuple[Tensor, ...]]) -> None:
        self.capacity = capacity
        self._make = make
        self._views: dict[int, tuple[Tensor, ...]] = {}

    def __getitem__(self, size: int) -> tuple[Tensor, ...]:
        views = self._views.get(size)
        if views is None:
            views = self._views[size] = self._make(size)
        return views
