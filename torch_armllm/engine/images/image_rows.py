"""Rows that stand for the picture tokens of a prompt."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor


class PictureRows:
    """Rows of the picture tokens of one prompt; they are kept until its request ends.

    Args:
        positions: of the tokens in the prompt, in order.
        rows: their embeddings, and what early layers add to them, ``(n, (1 + layers) · hidden)``, in the
            dtype of the model's embeddings.
        rotary: int64 ``(T, n)``, for M-RoPE: time, row and column of each token of the prompt, from whose
            largest number later tokens count on.  None: tokens have one position each.
        spans: first and last position, exclusive, of tokens that all attend to each other.
        ids: of the prompt; needed if a span holds tokens of text too.

    Attributes:
        keys: a negative number for each token, made from all of it that the step computes from: the prefix
            cache compares it instead of the token id, which is the same for all pictures.
        rotary: of all tokens of the prompt, one after another.
        rotary_offset: position of a token after the prompt minus its place.
    """

    def __init__(
        self,
        positions: list[int],
        rows: Tensor,
        rotary: Tensor | None = None,
        spans: Sequence[tuple[int, int]] = (),
        ids: Sequence[int] = (),
    ) -> None:
        assert len(positions) == len(rows)
        self.positions = positions
        self.rows = rows
        self.rotary = None if rotary is None else array("q", rotary.flatten().tolist())
        # times of a video may be larger than the positions of the text behind it, from which others count on
        self.rotary_offset = 0 if rotary is None else int(rotary[-1].max()) + 1 - len(rotary)
        self.spans = list(spans)
        contents = [row.numpy().tobytes() for row in rows.contiguous().view(torch.uint8)]
        if rotary is not None:
            contents = [
                content + rotary[at].numpy().tobytes()
                for content, at in zip(contents, positions, strict=True)
            ]
        self._further: dict[int, int] = {}
        for first, last in self.spans:  # each of its tokens is computed from all of them
            within = self.within(first, last)
            count = within.stop - within.start
            text = array("q", ids[first:last]).tobytes() if count < last - first else b""
            all_of_it = _key(text + b"".join(contents[within]))
            contents[within] = [b"%d of %d" % (at, all_of_it) for at in range(count)]
            if text:  # the prefix cache finds tokens behind the first one only if it is the same
                self._further[first] = all_of_it
        self.keys = [_key(content) for content in contents]

    def within(self, start: int, end: int) -> slice:
        """Returns the tokens at positions ``start`` to ``end``."""
        return slice(bisect_left(self.positions, start), bisect_left(self.positions, end))

    def cache_ids(self, token_ids: list[int]) -> list[int]:
        """Returns a sequence's token ids with the keys of picture tokens in their places."""
        ids = list(token_ids)
        for position, key in zip(self.positions, self.keys, strict=True):
            ids[position] = key
        for position, key in self._further.items():
            ids[position] = key
        return ids


def _key(content: bytes) -> int:
    return -1 - int.from_bytes(hashlib.blake2b(content, digest_size=16).digest(), "little")
