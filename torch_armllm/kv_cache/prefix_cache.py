"""Which blocks hold which text, so that a prompt finds what was computed for another."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count

_Key = tuple[int, tuple[int, ...]]

_NOTHING = 0
"""The content in front of a first block."""
_UNKNOWN = -1


class PrefixCache:
    """Full blocks by the text that they end, and the ones among them that nobody holds, longest unused first.

    A text is a chain of blocks. Each link has a number of its own, its content, which is never given twice;
    it is found by the content in front of it and its own tokens. The dictionary hashes both and compares
    them, so by induction a block is found by exactly its text, whatever hashes coincide.

    Attributes:
        tokens_asked: tokens that were looked for by those who were admitted.
        tokens_found: how many of them needed not be computed.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.tokens_asked = 0
        self.tokens_found = 0
        self._blocks: dict[_Key, int] = {}
        self._keys: list[_Key | None] = [None] * num_blocks
        self._contents = [_UNKNOWN] * num_blocks
        self._numbers = count(_NOTHING + 1)
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def idle(self) -> int:
        """Blocks that can be found and that nobody holds."""
        return len(self._idle)

    @property
    def hit_rate(self) -> float:
        """The part of the tokens asked for that was found, 0 … 1."""
        return self.tokens_found / self.tokens_asked if self.tokens_asked else 0.0

    def find(self, token_ids: Sequence[int], length: int) -> list[int]:
        """The blocks that hold the longest known beginning of ``token_ids[:length]``."""
        found: list[int] = []
        content, size = _NOTHING, self.block_size
        for end in range(size, length + 1, size):
            block = self._blocks.get((content, tuple(token_ids[end - size : end])))
            if block is None:
                break
            found.append(block)
            content = self._contents[block]
        return found

    def insert(self, block: int, before: int | None, tokens: Sequence[int]) -> None:
        """Makes a block findable that is full now; ``before`` is the block in front of it.

        Where another block holds the same text, that one stays the one that is found.
        """
        content = _NOTHING if before is None else self._contents[before]
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
        """Nobody holds a block any more; whether it is worth being kept."""
        if self._keys[block] is None:
            self._contents[block] = _UNKNOWN
            return False
        self._idle[block] = None
        return True

    def revive(self, block: int) -> None:
        """Somebody holds an idle block again."""
        del self._idle[block]

    def evict(self) -> int:
        """Takes the block that was idle for longest; its text can no longer be found."""
        block, _ = self._idle.popitem(last=False)
        key = self._keys[block]
        assert key is not None and self._blocks[key] == block
        del self._blocks[key]
        self._keys[block] = None
        self._contents[block] = _UNKNOWN
        return block
