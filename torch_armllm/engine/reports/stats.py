"""Engine statistics: totals since the start, and a log line of throughput while requests run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch_armllm.engine.request import Sequence
from torch_armllm.engine.scheduling.step import Step
from torch_armllm.kv_cache.disk.disk_cache import DiskCounts
from torch_armllm.plan.expert_store import ExpertCounts

INTERVAL = 10.0
"""Seconds between two log lines."""
_PAUSE = 1.0  # seconds; a longer gap between steps was idle time and does not count in the rates

_logger = logging.getLogger("torch_armllm.engine.stats")


class Gauges(NamedTuple):
    """Current state of an engine."""

    running: int
    """Running sequences."""
    waiting: int
    """Waiting sequences, preempted ones included."""
    kv_usage: float
    """Fraction of the blocks that sequences hold, 0 … 1."""
    hit_rate: float
    """Fraction of the prompt tokens that the prefix cache held, 0 … 1."""


@dataclass
class Totals:
    """Counts since the engine started.

    Attributes:
        steps: computed steps.
        prompt_tokens: computed prompt tokens; those from the prefix cache do not count.
        generation_tokens: sampled tokens.
        draft_rounds: verified drafts.
        draft_tokens: verified draft tokens.
        accepted_tokens: accepted draft tokens.
        preemptions: preempted sequences.
    """

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    draft_rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0


class EngineStats:
    """Counts the work of steps, and logs throughput every few seconds.

    Args:
        gauges: returns the state of the engine.
        log: writes log lines.
        interval: seconds between two lines.
        clock: returns seconds.
        experts: returns the counts of a cache of experts; None: all weights are in memory.
        disk: returns the counts of a prefix cache on disk; None: there is none.

    Attributes:
        gauges: returns the state of the engine.
        experts: see above.
        disk: see above.
        totals: counts since the start.
    """

    def __init__(
        self,
        gauges: Callable[[], Gauges],
        log: bool = True,
        interval: float = INTERVAL,
        clock: Callable[[], float] = time.monotonic,
        experts: Callable[[], ExpertCounts] | None = None,
        disk: Callable[[], DiskCounts] | None = None,
    ) -> None:
        self.totals = Totals()
        self.gauges = gauges
        self.experts = experts
        self.disk = disk
        self._logged_experts = None if experts is None else experts()
        self._log = log
        self._interval = interval
        self._clock = clock
        self._logged = Totals()
        self._since = self._last = clock()

    def record(
        self, step: Step, drawn: Mapping[Sequence, GenericSequence[int]], began: float, now: float
    ) -> None:
        """Counts a computed step; called before `Scheduler.complete`.

        Args:
            step: as it was scheduled.
            drawn: the new tokens of every sequence that sampled some.
            began: time at which it was scheduled, by the same clock as ``now``.
            now: time at which it was computed.
        """
        totals = self.totals
        if began - self._last > _PAUSE:
            self._since += began - self._last
        totals.steps += 1
        totals.preemptions += len(step.preempted)
        if step.decode_only:  # no other count changes
            totals.generation_tokens += len(drawn)
        else:
            self._count(step, drawn)
        self._last = now
        if now - self._since >= self._interval:
            if self._log:
                _logger.info("%s", self.line(now - self._since))
            self._since, self._logged = now, replace(totals)
            if self.experts is not None:
                self._logged_experts = self.experts()

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
        """Returns the log line: rates since the last line, and the state of the engine."""
        totals, logged, gauges = self.totals, self._logged, self.gauges()
        prompt = (totals.prompt_tokens - logged.prompt_tokens) / seconds
        generation = (totals.generation_tokens - logged.generation_tokens) / seconds
        text = (
            f"Avg prompt throughput: {prompt:.1f} tokens/s, "
            f"Avg generation throughput: {generation:.1f} tokens/s, "
            f"Running: {gauges.running} reqs, Waiting: {gauges.waiting} reqs, "
            f"KV cache usage: {100 * gauges.kv_usage:.1f}%, "
            f"Prefix cache hit rate: {100 * gauges.hit_rate:.1f}%"
        )
        if rounds := totals.draft_rounds - logged.draft_rounds:
            drafted = totals.draft_tokens - logged.draft_tokens
            accepted = totals.accepted_tokens - logged.accepted_tokens
            text += (
                f", Draft acceptance rate: {100 * accepted / drafted:.1f}%, "
                f"Mean acceptance length: {1 + accepted / rounds:.2f}"
            )
        return text + self._line_of_experts(seconds)

    def _line_of_experts(self, seconds: float) -> str:
        if self.experts is None or self._logged_experts is None:
            return ""
        now, logged = self.experts(), self._logged_experts
        hits, misses = now.hits - logged.hits, now.misses - logged.misses
        read, waited = now.bytes_read - logged.bytes_read, now.waited - logged.waited
        return (
            f", Expert cache hit rate: {100 * hits / max(1, hits + misses):.1f}%, "
            f"read {read / seconds / 1e6:.0f} MB/s, waited {100 * waited / 1e9 / seconds:.0f}% of the time"
        )
