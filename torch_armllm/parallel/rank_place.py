"""Places of processes in a grid: stages of a pipeline, each with several tensor parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankPlace:
    """The place of a process: ranks of a stage are adjacent, so that they run on cores of one machine.

    Attributes:
        rank: number of the process.
        tensor_ranks: number of tensor parallel ranks of each stage.
        stages: number of stages.
    """

    rank: int
    tensor_ranks: int
    stages: int

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.tensor_ranks * self.stages

    @property
    def stage(self) -> int:
        """Number of the stage."""
        return self.rank // self.tensor_ranks

    @property
    def tensor_rank(self) -> int:
        """Number among the ranks of the stage."""
        return self.rank % self.tensor_ranks

    @property
    def members(self) -> range:
        """Ranks of the stage."""
        first = self.stage * self.tensor_ranks
        return range(first, first + self.tensor_ranks)

    @property
    def previous(self) -> int:
        """The rank of the stage before that sends rows to this one; the last stage is before the first."""
        return (self.rank - self.tensor_ranks) % self.size

    @property
    def following(self) -> int:
        """The rank of the stage after that this one sends rows to."""
        return (self.rank + self.tensor_ranks) % self.size

    def __str__(self) -> str:
        if self.stages == 1:
            return f"tensor parallel rank {self.rank}"
        if self.tensor_ranks == 1:
            return f"pipeline stage {self.rank}"
        return f"tensor parallel rank {self.tensor_rank} of pipeline stage {self.stage}"
