"""Steps of sequences in a paged cache, for the tests of selections."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


def starts(counts: tuple[int, ...]) -> Tensor:
    """The first packed token of each sequence, then the number of all tokens: int32."""
    return torch.tensor([sum(counts[:i]) for i in range(len(counts) + 1)], dtype=torch.int32)


@dataclass(frozen=True)
class PagedSteps:
    """Sequences in a paged cache, the last tokens of which are computed.

    Attributes:
        block_table: int32 (sequences, blocks), padded with -1.
        seq_lens: tokens in the cache, per sequence; includes those that are computed.
        query_lens: tokens that are computed, per sequence.
    """

    block_table: Tensor
    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]

    @property
    def steps(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """Block table, starts, lengths and the largest length, as the ops take them."""
        lengths = torch.tensor(self.seq_lens, dtype=torch.int32)
        return self.block_table, starts(self.query_lens), lengths, max(self.seq_lens, default=0)


@dataclass(frozen=True)
class PagedPlaces:
    """Places of random sequences in a paged cache; their blocks are in random order.

    Attributes:
        blocks: number of blocks of the cache; two are not used.
        block_table: int32 (sequences, blocks), padded with -1.
        slots: the slots of the tokens of each sequence: int64.
    """

    blocks: int
    block_table: Tensor
    slots: list[Tensor]

    @classmethod
    def random(cls, seq_lens: tuple[int, ...], block_size: int, random: torch.Generator) -> PagedPlaces:
        """Places sequences of these lengths."""
        counts = [-(-n // block_size) for n in seq_lens]
        blocks = sum(counts) + 2
        order = torch.randperm(blocks, generator=random).to(torch.int32)
        table = torch.full((len(seq_lens), max(counts, default=0)), -1, dtype=torch.int32)
        slots = []
        for i, (length, count) in enumerate(zip(seq_lens, counts, strict=True)):
            table[i, :count] = order[sum(counts[:i]) : sum(counts[: i + 1])]
            at = torch.arange(length)
            slots.append(table[i].long()[at // block_size] * block_size + at % block_size)
        return cls(blocks, table, slots)

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        """The length and the slots of each sequence."""
        return ((len(slots), slots) for slots in self.slots)
