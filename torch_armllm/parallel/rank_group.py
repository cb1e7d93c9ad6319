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


def shares(count: int, ranks: int) -> list[range]:
    """Returns adjacent parts of ``count`` things, one for each rank, whose sizes differ by one at most."""
    bounds = [count * rank // ranks for rank in range(ranks + 1)]
    return [range(begin, end) for begin, end in zip(bounds[:-1], bounds[1:], strict=True)]


@dataclass(frozen=True)
class HeadShares:
    """The attention heads of each rank: query heads, and the heads of keys and values that they read.

    Attributes:
        group: query heads that read the same head of keys and values.
    """

    query: Sequence[range]
    key: Sequence[range]
    group: int

    @classmethod
    def of(cls, query_heads: int, key_heads: int, ranks: int) -> HeadShares | None:
        """Returns whole groups for each rank; None if no rank's heads would form whole groups.

        With fewer heads of keys and values than ranks, several ranks have the same one.
        """
        group = query_heads // key_heads
        if key_heads >= ranks:
            return cls._of_groups(key_heads, group, ranks)
        if ranks % key_heads != 0 or group % (ranks // key_heads) != 0:
            return None
        return cls._of_queries(query_heads, group, ranks)

    @classmethod
    def balanced(cls, query_heads: int, key_heads: int, ranks: int) -> HeadShares | None:
        """Returns as many query heads for each rank; None with fewer query heads than ranks.

        Ranks that share a group out both have its head of keys and values.  Where a rank would have more of
        them for it than with whole groups, groups are left whole: a long cache costs more than a head.
        """
        group = query_heads // key_heads
        if query_heads < ranks:
            return None
        shared = cls._of_queries(query_heads, group, ranks)
        most = max(1, -(-key_heads // ranks))
        if key_heads >= ranks and max(len(heads) for heads in shared.key) > most:
            return cls._of_groups(key_heads, group, ranks)
        return shared

    @classmethod
    def _of_groups(cls, key_heads: int, group: int, ranks: int) -> HeadShares:
        key = shares(key_heads, ranks)
        return cls([range(group * heads.start, group * heads.stop) for heads in key], key, group)

    @classmethod
    def _of_queries(cls, query_heads: int, group: int, ranks: int) -> HeadShares:
        query = shares(query_heads, ranks)
        return cls(query, [range(q.start // group, -(-q.stop // group)) for q in query], group)

    def skipped(self, rank: int) -> int | None:
        """Returns the query heads that a rank's first group lacks; None if its groups have equal sizes."""
        query, key = self.query[rank], self.key[rank]
        skipped = query.start - self.group * key.start
        return None if len(key) == 1 or len(query) == self.group * len(key) else skipped
