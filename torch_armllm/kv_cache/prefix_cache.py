"""Prefix cache: finds blocks by their tokens, so that sequences share what was computed once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count

_Key = tuple[int, tuple[int, ...]]

NOTHING = 0
"""Content number in front of the first block of a sequence."""
_UNKNOWN = -1
"""Content number of a block that is not full, or that was freed or evicted."""


class PrefixCache:
    """Maps token prefixes to the full blocks that end them; evicts unreferenced blocks in LRU order.

    A prefix is a chain of blocks.  Each cached prefix has a content number, which is never reused.  A block
    is looked up by the content number of the previous block and by its own tokens.  The dictionary hashes
    both and compares them, so by induction a block is found for exactly its prefix, even if hashes collide.

    Attributes:
        tokens_queried: tokens that were looked up for admitted sequences.
        tokens_hit: tokens among them that did not have to be computed.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.tokens_queried = 0
        self.tokens_hit = 0
        self._blocks: dict[_Key, int] = {}
        self._keys: list[_Key | None] = [None] * num_blocks
        self._contents = [_UNKNOWN] * num_blocks
        self._numbers = count(NOTHING + 1)
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def idle(self) -> int:
        """Number of cached blocks without references."""
        return len(self._idle)

    @property
    def hit_rate(self) -> float:
        """Fraction of the tokens looked up that were found, 0 … 1."""
        return self.tokens_hit / self.tokens_queried if self.tokens_queried else 0.0

    def find(self, token_ids: Sequence[int], length: int, root: int = NOTHING) -> list[int]:
        """Returns the blocks that hold the longest cached prefix of ``token_ids[:length]``.

        Args:
            token_ids: of the sequence.
            length: tokens to look up.
            root: number in front of the sequence: its own for each adapter, as keys and values depend on it.
        """
        blocks: list[int] = []
        content, size = root, self.block_size
        for end in range(size, length + 1, size):
            block = self._blocks.get((content, tuple(token_ids[end - size : end])))
            if block is None:
                break
            blocks.append(block)
            content = self._contents[block]
        return blocks

    def insert(self, block: int, before: int | None, tokens: Sequence[int], root: int = NOTHING) -> None:
        """Makes a full block findable; ``before`` is the previous block of its sequence; see `find`.

        If another block already holds the same prefix, lookups keep returning that block.
        """
        content = root if before is None else self._contents[before]
        assert content != _UNKNOWN and len(tokens) == self.block_size
        key = (content, tuple(tokens))
        same = self._blocks.get(key)
        if same is None:
            self._blocks[key] = block
            self._keys[block] = key
            self._contents[block] = next(self._numbers)
        else:
            self._contents[block] = self._contents[same]

    def retire(self, block: int) -> bool:
        """Handles a block that lost its last reference.

        Returns:
            True if the block stays cached, False if the caller must free it.
        """
        if self._keys[block] is None:
            self._contents[block] = _UNKNOWN
            return False
        self._idle[block] = None
        return True

    def revive(self, block: int) -> None:
        """Removes a block that is referenced again from the idle blocks."""
        del self._idle[block]

    def content(self, block: int) -> int:
        """Returns the content number of a block that `find` returned."""
        return self._contents[block]

    def content_of(
        self, blocks: Sequence[int], token_ids: Sequence[int], length: int, root: int = NOTHING
    ) -> int | None:
        """Returns the content number of a sequence's first tokens; None if they are not cached.

        Args:
            blocks: of the sequence.
            token_ids: of the sequence.
            length: tokens of the prefix, which end a block.
            root: see `find`.
        """
        size = self.block_size
        assert length and length % size == 0
        last = length // size - 1
        content = self._contents[blocks[last - 1]] if last else root
        block = self._blocks.get((content, tuple(token_ids[length - size : length])))
        return None if block is None else self._contents[block]

    def evict(self) -> tuple[int, int]:
        """Removes the block that was idle for longest from the cache; returns it and its content number."""
        block, _ = self._idle.popitem(last=False)
        key = self._keys[block]
        assert key is not None and self._blocks[key] == block
        del self._blocks[key]
        self._keys[block] = None
        content, self._contents[block] = self._contents[block], _UNKNOWN
        return block, content
