"""Digests of token prefixes, by which files of blocks are found."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence

DIGEST_SIZE = 20
"""Bytes; too many for two prefixes to have the same digest."""


def prefix_digests(token_ids: Sequence[int], block_size: int) -> Iterator[bytes]:
    """Yields the digest of all tokens up to the end of each full block.

    Args:
        token_ids: tokens from the beginning of a sequence.
        block_size: tokens per block.
    """
    digest = b""
    for end in range(block_size, len(token_ids) + 1, block_size):
        tokens = array("q", token_ids[end - block_size : end]).tobytes()
        digest = hashlib.blake2b(digest + tokens, digest_size=DIGEST_SIZE).digest()
        yield digest
