"""What one step of the engine computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch_armllm.engine.request import Sequence


class Scheduled(NamedTuple):
    """The tokens of one sequence that a step computes: positions ``start`` to ``start + count``.

    They are those of ``(sequence.token_ids + sequence.draft)``, and the sequence has blocks for all of them.
    """

    sequence: Sequence
    start: int
    count: int  # type: ignore[assignment]  # tuple.count is not missed

    @property
    def end(self) -> int:
        """The first position that is not computed."""
        return self.start + self.count

    @property
    def draws(self) -> bool:
        """Whether the last known token is computed, so that the next can be drawn; a chunk draws none."""
        return self.end >= len(self.sequence.token_ids)

    @property
    def draft_count(self) -> int:
        """How many of the tokens are guesses: the last ones."""
        if not self.sequence.draft:
            return 0
        return max(0, self.end - len(self.sequence.token_ids))

    @property
    def wanted(self) -> range:
        """Positions whose logits are needed: those that tokens are drawn behind, or all of a prompt's."""
        if self.sequence.params.prompt_logprobs is not None and self.start < self.sequence.prompt_length:
            return range(self.start, self.end)
        return range(self.end - 1 - self.draft_count, self.end) if self.draws else range(0)


@dataclass
class Step:
    """A step: what to move, then what to compute.

    Attributes:
        scheduled: one entry a sequence.
        swaps_out: (block, swap block) pairs, to be copied first.
        swaps_in: (swap block, block) pairs, to be copied second.
        copies: (block, block) pairs: shared blocks that are about to be written, copied third.
        preempted: sequences that lost their blocks.
        prompt_work: what it reads of prompts; see `PrefillBudget`.
        decodes: says that it is a token for each of some sequences that have begun, and nothing else: the
            last one they know, without guesses.
    """

    scheduled: list[Scheduled] = field(default_factory=list)
    swaps_out: list[tuple[int, int]] = field(default_factory=list)
    swaps_in: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    prefill_work: float = 0.0
    decodes: bool = False

    @property
    def token_count(self) -> int:
        """Tokens that the step computes."""
        return sum(s.count for s in self.scheduled)
