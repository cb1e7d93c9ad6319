"""One step of the engine: the tokens that it computes and the block copies before them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch_armllm.engine.request import Sequence


class Scheduled(NamedTuple):
    """Tokens of one sequence that a step computes: positions ``start`` to ``start + count``.

    The positions index ``sequence.token_ids + sequence.draft``; the sequence has blocks for all of them.
    """

    sequence: Sequence
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count

    @property
    def end(self) -> int:
        """Position after the last one."""
        return self.start + self.count

    @property
    def samples(self) -> bool:
        """True if the last known token is computed, so that the next one is sampled."""
        return self.end >= len(self.sequence.token_ids)

    @property
    def num_draft(self) -> int:
        """Number of draft tokens; they are the last ones."""
        if not self.sequence.draft:
            return 0
        return max(0, self.end - len(self.sequence.token_ids))

    @property
    def logit_positions(self) -> range:
        """Positions whose logits are needed: for sampling, or all for `SamplingParams.prompt_logprobs`."""
        if self.sequence.params.prompt_logprobs is not None and self.start < self.sequence.prompt_length:
            return range(self.start, self.end)
        return range(self.end - 1 - self.num_draft, self.end) if self.samples else range(0)


class StateMove(NamedTuple):
    """A copy of a sequence's states, within the slots of the engine or from or to those of swap memory."""

    kind: Literal["copy", "swap_out", "swap_in"]
    source: int
    target: int


@dataclass
class Step:
    """Copies of states and blocks, then tokens to compute.

    Attributes:
        scheduled: one entry per sequence.
        state_moves: of recurrent layers' states, one after another.
        saves_states: True if the step also writes states to the slots of `Sequence.saves`.
        swaps_out: (block, swap block) pairs, copied first.
        swaps_in: (swap block, block) pairs, copied second.
        copies: (block, block) pairs, copied third: copy-on-write of shared blocks.
        preempted: sequences that were preempted when the step was scheduled.
        prefill_work: cost of its prompt tokens; see `PrefillBudget.used`.
        decode_only: True if each entry is the last known token of a sequence that has output tokens, without
            draft tokens.
        num_draft: number of draft tokens of all sequences.
        advanced: sequences whose tokens count as computed before the step has ended; see `Scheduler.begin`.
    """

    scheduled: list[Scheduled] = field(default_factory=list)
    state_moves: list[StateMove] = field(default_factory=list)
    saves_states: bool = False
    swaps_out: list[tuple[int, int]] = field(default_factory=list)
    swaps_in: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    prefill_work: float = 0.0
    decode_only: bool = False
    num_draft: int = 0
    advanced: set[Sequence] = field(default_factory=set)

    @property
    def only_extends(self) -> bool:
        """True if it is `decode_only` but for draft tokens."""
        return self.decode_only or 0 < self.num_draft == self.token_count - len(self.scheduled)

    @property
    def token_count(self) -> int:
        """Number of tokens that the step computes."""
        return sum(s.count for s in self.scheduled)
