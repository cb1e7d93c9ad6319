"""What one step of the engine computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch_armllm.engine.request import Answer


class Scheduled(NamedTuple):
    """The tokens of one answer that a step computes: positions ``start`` to ``start + count``.

    They are those of ``(answer.token_ids + answer.draft)``, and the answer has blocks for all of them.
    """

    answer: Answer
    start: int
    count: int  # type: ignore[assignment]  # tuple.count is not missed

    @property
    def end(self) -> int:
        """The first position that is not computed."""
        return self.start + self.count

    @property
    def draws(self) -> bool:
        """Whether the last known token is computed, so that the next can be drawn; a chunk draws none."""
        return self.end >= len(self.answer.token_ids)

    @property
    def draft_count(self) -> int:
        """How many of the tokens are guesses: the last ones."""
        if not self.answer.draft:
            return 0
        return max(0, self.end - len(self.answer.token_ids))

    @property
    def wanted(self) -> range:
        """Positions whose logits are needed: those that tokens are drawn behind, or all of a prompt's."""
        if self.answer.params.prompt_logprobs is not None and self.start < self.answer.prompt_length:
            return range(self.start, self.end)
        return range(self.end - 1 - self.draft_count, self.end) if self.draws else range(0)


@dataclass
class Step:
    """A step: what to move, then what to compute.

    Attributes:
        scheduled: one entry an answer.
        swaps_out: (block, swap block) pairs, to be copied first.
        swaps_in: (swap block, block) pairs, to be copied second.
        copies: (block, block) pairs: shared blocks that are about to be written, copied third.
        preempted: answers that lost their blocks.
        prompt_work: what it reads of prompts; see `Room`.
        decodes: says that it is a token for each of some answers that have begun, and nothing else: the last
            one they know, without guesses.
    """

    scheduled: list[Scheduled] = field(default_factory=list)
    swaps_out: list[tuple[int, int]] = field(default_factory=list)
    swaps_in: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Answer] = field(default_factory=list)
    prompt_work: float = 0.0
    decodes: bool = False

    @property
    def token_count(self) -> int:
        """Tokens that the step computes."""
        return sum(s.count for s in self.scheduled)
