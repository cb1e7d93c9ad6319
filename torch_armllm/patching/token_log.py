"""The tokens that a cache was made of, for models whose modules keep other things in theirs than the plan."""

from __future__ import annotations

import torch
from torch import Tensor


class TokenLog:
    """Ids, positions and mask of a batch, each ``(batch, length)``; padding included."""

    def __init__(self, batch_size: int) -> None:
        self.ids = torch.zeros(batch_size, 0, dtype=torch.int64)
        self.positions = torch.zeros(batch_size, 0, dtype=torch.int64)
        self.kept = torch.zeros(batch_size, 0, dtype=torch.int64)

    def append(self, ids: Tensor, positions: Tensor, kept: Tensor | None) -> None:
        """Further tokens; ``kept`` says which are no padding, None: all."""
        mask = torch.ones_like(ids) if kept is None else kept.long()
        self.ids = torch.cat([self.ids, ids], 1)
        self.positions = torch.cat([self.positions, positions], 1)
        self.kept = torch.cat([self.kept, mask], 1)

    def choose(self, indices: list[int]) -> None:
        """Keeps rows."""
        self.ids, self.positions, self.kept = (x[indices] for x in (self.ids, self.positions, self.kept))

    def crop(self, length: int) -> None:
        """Drops the tokens past a length."""
        self.ids, self.positions, self.kept = (x[:, :length] for x in (self.ids, self.positions, self.kept))
