"""Log of the tokens in a cache, for models whose modules cannot continue from the plan's cache."""

from __future__ import annotations

import torch
from torch import Tensor


class TokenLog:
    """Token ids, positions and mask of a batch, each ``(batch, length)`` int64, padding included."""

    def __init__(self, batch_size: int) -> None:
        self.ids = torch.zeros(batch_size, 0, dtype=torch.int64)
        self.positions = torch.zeros(batch_size, 0, dtype=torch.int64)
        self.kept = torch.zeros(batch_size, 0, dtype=torch.int64)

    def append(self, ids: Tensor, positions: Tensor, kept: Tensor | None) -> None:
        """Appends tokens; ``kept`` marks those that are not padding, None: all."""
        mask = torch.ones_like(ids) if kept is None else kept.long()
        self.ids = torch.cat([self.ids, ids], 1)
        self.positions = torch.cat([self.positions, positions], 1)
        self.kept = torch.cat([self.kept, mask], 1)

    def choose(self, indices: list[int]) -> None:
        """Keeps the rows ``indices``, in that order; an index may repeat."""
        self.ids, self.positions, self.kept = (x[indices] for x in (self.ids, self.positions, self.kept))

    def crop(self, length: int) -> None:
        """Keeps the first ``length`` positions."""
        self.ids, self.positions, self.kept = (x[:, :length] for x in (self.ids, self.positions, self.kept))
