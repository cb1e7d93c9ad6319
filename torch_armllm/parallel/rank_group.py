"""The group of ranks that compute a model together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankGroup:
    """Ranks that compute every step together, each with a part of the weights.

    Attributes:
        rank: number of this process.
        size: number of ranks.
        communicator: handle of the communicator through which they exchange columns.
        least_columns: layers with fewer output columns are computed as a whole by every rank, as an exchange
            would take longer.
        whole_experts: each rank computes whole experts, and not columns of all.
    """

    rank: int
    size: int
    communicator: int
    least_columns: int = 256
    whole_experts: bool = False

    def share(self, count: int) -> range:
        """Returns this rank's part of ``count`` things."""
        return shares(count, self.size)[self.rank]

    def key_heads(self, count: int) -> int:
        """Returns how many of ``count`` heads of keys and values this rank keeps."""
        return max(1, len(self.share(count)))


def shares(count: int, ranks: int) -> list[range]:
    """Returns adjacent parts of ``count`` things, one for each rank, whose sizes differ by one at most."""
    bounds = [count * rank // ranks for rank in range(ranks + 1)]
    return [range(begin, end) for begin, end in zip(bounds[:-1], bounds[1:], strict=True)]


@dataclass(frozen=True)
class HeadShares:
    """The attention heads of each rank: query heads, and the heads of keys and values that they read."""

    query: Sequence[range]
    key: Sequence[range]

    @classmethod
    def of(cls, query_heads: int, key_heads: int, ranks: int) -> HeadShares | None:
        """Returns the heads of each rank; None if no rank's heads would form whole groups.

        With fewer heads of keys and values than ranks, several ranks have the same one.
        """
        group = query_heads // key_heads
        if key_heads >= ranks:
            key = shares(key_heads, ranks)
            return cls([range(group * heads.start, group * heads.stop) for heads in key], key)
        if ranks % key_heads != 0 or group % (ranks // key_heads) != 0:
            return None
        query = shares(query_heads, ranks)
        return cls(query, [range(heads.start // group, heads.start // group + 1) for heads in query])
