"""How fast an engine goes: totals since it began, and a line of rates in the log while requests run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch_armllm.engine.request import Sequence
from torch_armllm.engine.step import Step

INTERVAL = 10.0
"""Seconds between two lines."""
_PAUSE = 1.0  # seconds without a step in which there was nothing to do: no part of the rates

_logger = logging.getLogger(__name__)


class Gauges(NamedTuple):
    """What an engine holds at a moment."""

    running: int
    """Sequences that take part in steps."""
    waiting: int
    """Sequences that do not, preempted ones included."""
    kv_usage: float
    """Part of the blocks that sequences hold, 0 … 1."""
    hit_rate: float
    """Part of the prompts' tokens that the prefix cache held, 0 … 1."""


@dataclass
class Totals:
    """Counts since the engine began.

    Attributes:
        steps: that were computed.
        prompt_tokens: that were computed: those found in the prefix cache are none of them.
        generation_tokens: that were drawn.
        draft_rounds: steps of sequences that had guesses.
        draft_tokens: that were guessed.
        accepted_tokens: of those, that were right.
        preemptions: sequences that lost their blocks.
    """

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    draft_rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0


class EngineStats:
    """Counts what steps do, and tells it every few seconds.

    Args:
        gauges: asked when a line is due.
        log: whether lines are written.
        interval: seconds between them.
        clock: in seconds.

    Attributes:
        gauges: what the engine holds now.
        totals: since the beginning.
    """

    def __init__(
        self,
        gauges: Callable[[], Gauges],
        log: bool = True,
        interval: float = INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.totals = Totals()
        self.gauges = gauges
        self._log = log
        self._interval = interval
        self._clock = clock
        self._told = Totals()
        self._since = self._last = clock()

    def record(
        self, step: Step, drawn: Mapping[Sequence, GenericSequence[int]], began: float, now: float
    ) -> None:
        """Counts a step that was computed; called before the scheduler completes it.

        Args:
            step: as it was scheduled.
            drawn: the tokens of every sequence that it brought forward.
            began: when it was scheduled, by the clock.
            now: by the clock.
        """
        totals = self.totals
        if began - self._last > _PAUSE:
            self._since += began - self._last
        totals.steps += 1
        totals.preemptions += len(step.preempted)
        if step.decodes:  # the rest is nothing then
            totals.generation_tokens += len(drawn)
        else:
            self._count(step, drawn)
        self._last = now
        if now - self._since >= self._interval:
            if self._log:
                _logger.info("%s", self.line(now - self._since))
            self._since, self._told = now, replace(totals)

    def _count(self, step: Step, drawn: Mapping[Sequence, GenericSequence[int]]) -> None:
        totals = self.totals
        for tokens in drawn.values():
            totals.generation_tokens += len(tokens)
        for sequence, start, count in step.scheduled:
            if start < sequence.prompt_length:
                totals.prompt_tokens += min(count, sequence.prompt_length - start)
            elif sequence.draft and (drafted := start + count - len(sequence.token_ids)) > 0:
                totals.draft_rounds += 1
                totals.draft_tokens += drafted
                totals.accepted_tokens += len(drawn[sequence]) - 1

    def line(self, seconds: float) -> str:
        """The rates since the last line, and what the engine holds."""
        totals, told, gauges = self.totals, self._told, self.gauges()
        prompt = (totals.prompt_tokens - told.prompt_tokens) / seconds
        generation = (totals.generation_tokens - told.generation_tokens) / seconds
        text = (
            f"Avg prompt throughput: {prompt:.1f} tokens/s, "
            f"Avg generation throughput: {generation:.1f} tokens/s, "
            f"Running: {gauges.running} reqs, Waiting: {gauges.waiting} reqs, "
            f"KV cache usage: {100 * gauges.kv_usage:.1f}%, "
            f"Prefix cache hit rate: {100 * gauges.hit_rate:.1f}%"
        )
        if rounds := totals.draft_rounds - told.draft_rounds:
            drafted = totals.draft_tokens - told.draft_tokens
            accepted = totals.accepted_tokens - told.accepted_tokens
            text += (
                f", Draft acceptance rate: {100 * accepted / drafted:.1f}%, "
                f"Mean acceptance length: {1 + accepted / rounds:.2f}"
            )
        return text
