"""Embeddings of the picture tokens of a prompt."""

from __future__ import annotations

import hashlib
from bisect import bisect_left

import torch
from torch import Tensor


class PictureRows:
    """Embeddings of the picture tokens of one prompt; they are kept until its request ends.

    Args:
        positions: of the tokens in the prompt, in order.
        rows: their embeddings ``(n, hidden)``, in the dtype of the model's embeddings.

    Attributes:
        keys: a negative number for each token, made from its embedding: the prefix cache compares it instead
            of the token id, which is the same for all pictures.
    """

    def __init__(self, positions: list[int], rows: Tensor) -> None:
        assert len(positions) == len(rows)
        self.positions = positions
        self.rows = rows
        self.keys = [_key(row) for row in rows.contiguous().view(torch.uint8)]

    def within(self, start: int, end: int) -> slice:
        """Returns the tokens at positions ``start`` to ``end``."""
        return slice(bisect_left(self.positions, start), bisect_left(self.positions, end))

    def cache_ids(self, token_ids: list[int]) -> list[int]:
        """Returns a sequence's token ids with the keys of picture tokens in their places."""
        ids = list(token_ids)
        for position, key in zip(self.positions, self.keys, strict=True):
            ids[position] = key
        return ids


def _key(row: Tensor) -> int:
    digest = hashlib.blake2b(row.numpy().tobytes(), digest_size=16).digest()
    return -1 - int.from_bytes(digest, "little")
