"""A stage of a pipeline of processes: the adjacent layers that one of them computes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """A place in a pipeline.

    Attributes:
        number: of this process's stage; stage 0 embeds the tokens, and computes the logits at last.
        count: number of stages.
        head_bytes: bytes of the weights of the output layer, which stage 0 reads beside those of its layers.
    """

    number: int
    count: int
    head_bytes: int = 0

    @property
    def is_first(self) -> bool:
        """True for the stage that embeds the tokens."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """True for the stage that computes the last hidden states."""
        return self.number == self.count - 1
