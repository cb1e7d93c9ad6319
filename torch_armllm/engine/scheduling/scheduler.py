"""What the next step computes: bookkeeping without a tensor."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping
from collections.abc import Sequence as GenericSequence

from torch_armllm.engine.outputs import FinishReason
from torch_armllm.engine.request import Request, Sequence, Status
from torch_armllm.engine.scheduling.block_tables import BlockTables
from torch_armllm.engine.scheduling.chunk_budget import ChunkBudget, PrefillBudget
from torch_armllm.engine.scheduling.config import SchedulerConfig
from torch_armllm.engine.scheduling.policy import Policy, PriorityPolicy
from torch_armllm.engine.step import Scheduled, Step
from torch_armllm.kv_cache.block_manager import BlockManager

__all__ = ["Scheduler", "SchedulerConfig"]

_RUNNING = Status.RUNNING

_Place = tuple[float, int, int]
"""Rank, arrival and index of a sequence: smaller ones are served first."""


class Scheduler:
    """Fills steps: a token for every sequence that is being written, then prompts into what is left.

    A prompt is admitted when there are blocks for all of it, and gets them at once; only the tokens of
    sequences ask for blocks later. When there are none, the last running sequence in the policy's order gives
    up its own; so do those of a worse rank than one that waits, if that lets it in. Who is scheduled in a
    step comes before all that may still be preempted in it, and where a sequence's token cost another one its
    blocks nobody is admitted: so no block that a step moves is moved by it once more.

    Attributes:
        max_length: most tokens of a prompt and its sequence: `max_model_len`, or what all blocks hold.
        preemptions: how often a sequence lost its blocks.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, policy: Policy | None = None) -> None:
        self.config = config
        self.blocks = blocks
        self.policy = policy if policy is not None else PriorityPolicy()
        self.max_length = min(config.max_model_len, blocks.num_blocks * blocks.block_size)
        self.preemptions = 0
        self._requests: dict[str, Request] = {}
        self._arrivals = 0
        self._places: dict[Sequence, _Place] = {}
        self._place = self._places.__getitem__
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._forked: list[Sequence] = []
        self._tables = BlockTables(blocks)
        self._seats = 0
        self._refused: tuple[Sequence, int, int] | None = None
        self._hopeless: tuple[Sequence, int] | None = None
        most = config.max_step_time if config.enable_chunked_prefill else None
        self._chunk_budget = None if most is None else ChunkBudget(most)

    @property
    def has_unfinished(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self._requests)

    @property
    def running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that were not admitted yet, or lost what was computed."""
        return len(self._waiting) - self.swapped

    @property
    def swapped(self) -> int:
        """Sequences whose blocks lie in swap memory."""
        return len(self._tables.swapped)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: its name is taken, or it can never be served.
        """
        length, width = len(request.prompt_token_ids), request.params.num_sequences
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id!r} is not finished: give the new one another name")
        if length == 0:
            raise ValueError(f"request {request.request_id!r} has no prompt: give at least one token")
        if length >= self.max_length:
            limit = "max_model_len" if self.max_length == self.config.max_model_len else "the KV cache"
            raise ValueError(
                f"the prompt of request {request.request_id!r} has {length} tokens; {limit} allows "
                f"{self.max_length} with at least one of an answer: shorten it"
                + ("" if limit == "max_model_len" else ", or give more kv_cache_memory")
            )
        if width > self.config.max_num_seqs:
            raise ValueError(
                f"request {request.request_id!r} wants {width} answers; max_num_seqs is "
                f"{self.config.max_num_seqs}: ask for fewer, or raise it"
            )
        (sequence,) = request.sequences
        self._requests[request.request_id] = request
        self._places[sequence] = (self.policy.rank(request), self._arrivals, 0)
        self._arrivals += 1
        insort(self._waiting, sequence, key=self._place)

    def abort(self, request_id: str) -> Request | None:
        """Ends all sequences of a request; None where there is no such request (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        for sequence in request.sequences:
            if sequence.status is not Status.FINISHED:
                self.finish(sequence, "abort")
        return request

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence and lets go of all it holds."""
        assert sequence.status is not Status.FINISHED
        if sequence.status is Status.RUNNING:
            self._leave(self._running, sequence)
            self._seats -= self._seats_of(sequence)
        else:
            self._leave(self._waiting, sequence)
        self._tables.forget(sequence)
        sequence.status, sequence.finish_reason = Status.FINISHED, reason
        del self._places[sequence]
        if self._refused is not None and self._refused[0] is sequence:
            self._refused = None
        if self._hopeless is not None and self._hopeless[0] is sequence:
            self._hopeless = None
        if sequence.request.finished:
            del self._requests[sequence.request.request_id]

    def schedule(self) -> Step:
        """The next step; it has something to compute while there are unfinished requests."""
        step = Step()
        if self._waiting and self._running:
            self._make_way(step)
        made_way = len(step.preempted)
        left, reading = self._schedule_answers(step)
        if reading or self._waiting:
            budget = PrefillBudget(left)
            if self._chunk_budget is not None and step.scheduled:
                budget.work = self._chunk_budget.work()
            self._schedule_prompts(step, reading, budget, admit=len(step.preempted) == made_way)
            step.prefill_work = budget.taken
        assert step.scheduled or not self._requests
        return step

    def fork(self, sequence: Sequence) -> list[Sequence]:
        """The other ones of `n` sequences, to a prompt that the step at hand has read to its end."""
        request = sequence.request
        assert (
            sequence.status is Status.RUNNING and len(request.sequences) == 1 and sequence.output_length == 0
        )
        rank, arrival, _ = self._places[sequence]
        siblings = [
            Sequence(
                request,
                index,
                list(request.prompt_token_ids),
                blocks=self.blocks.share(sequence.blocks),
                computed=sequence.prompt_length,
                status=Status.RUNNING,
            )
            for index in range(1, request.params.num_sequences)
        ]
        request.sequences += siblings
        for sibling in siblings:
            self._places[sibling] = (rank, arrival, sibling.index)
            insort(self._running, sibling, key=self._place)
        self._forked += siblings
        return siblings

    def complete(self, step: Step, drawn: Mapping[Sequence, GenericSequence[int]]) -> None:
        """Enters what a step computed and what was drawn: the tokens that a draft guessed right, and one."""
        running, advance = _RUNNING, self._tables.advance
        for sequence, start, count in step.scheduled:
            if sequence.status is running:
                advance(sequence, start, start + count, drawn.get(sequence, ()))
        for sequence in self._forked:
            if sequence.status is running:
                advance(sequence, sequence.computed, sequence.computed, drawn.get(sequence, ()))
        self._forked.clear()

    def note_time(self, step: Step, seconds: float) -> None:
        """Takes note of how long a step took, for the next ones that read prompts beside sequences."""
        if self._chunk_budget is not None:
            self._chunk_budget.note(step.prefill_work, seconds)

    def _schedule_answers(self, step: Step) -> tuple[int, list[Sequence]]:
        """Takes all sequences that are being written into a step.

        Returns:
            How many tokens are left, and those sequences whose prompts are being read.
        """
        reading = []
        begun = True
        size, left = self.blocks.block_size, self.config.max_num_batched_tokens
        spare = left - len(self._running)
        for sequence in self._running:  # whose end is cut off by preemption
            start = sequence.computed
            if len(sequence.token_ids) - start > 1:
                reading.append(sequence)
                continue
            ready = start % size and not self.blocks.is_shared(sequence.blocks[-1])
            if not ready and not self._extend(sequence, step):
                break
            count = 1
            if start < sequence.prompt_length:
                begun = False
            if sequence.draft:
                begun = False
                most = min(spare, self.max_length - start - 1)
                drafted = self._tables.fit_draft(sequence, most, len(self._running))
                spare -= drafted
                count += drafted
            step.scheduled.append(Scheduled(sequence, start, count))
            left -= count
        step.decodes = begun
        return left, reading

    def _schedule_prompts(
        self, step: Step, reading: GenericSequence[Sequence], budget: PrefillBudget, admit: bool
    ) -> None:
        """Goes on with prompts that were admitted before, and admits others, all in their order."""
        for sequence in reading:
            if admit and self._waiting:
                self._admit(step, budget, self._places[sequence])
            self._read(sequence, step, budget)
        if admit and self._waiting:
            self._admit(step, budget)

    @staticmethod
    def _read(sequence: Sequence, step: Step, budget: PrefillBudget) -> None:
        """Takes as much of a prompt into a step as there is room for."""
        if budget.any:
            step.decodes = False
            count = budget.take(sequence.computed, len(sequence.token_ids) - sequence.computed)
            step.scheduled.append(Scheduled(sequence, sequence.computed, count))

    def _make_way(self, step: Step) -> None:
        """Takes seats and blocks from those of a worse rank than one that waits, where that lets it in."""
        first = self._waiting[0]
        rank, _, _ = self._places[first]
        kept = bisect_right(self._running, rank, key=lambda sequence: self._places[sequence][0])
        if kept == len(self._running) or self._hopeless == (first, kept):
            return
        others = self._running[:kept]
        seats = sum(map(self._seats_of, others))
        enough = seats + self._seats_of(first) <= self.config.max_num_seqs
        if not (enough and self._tables.fits_beside(first, others, seats)):
            self._hopeless = first, kept  # until one of those others has gone
            return
        while not self._is_welcome(first):
            assert len(self._running) > kept
            self._preempt(self._running[-1], step)
        self._refused = None

    def _is_welcome(self, sequence: Sequence) -> bool:
        """Whether a sequence that waits could be admitted now."""
        seats = self._seats + self._seats_of(sequence) <= self.config.max_num_seqs
        return seats and self._tables.fits(sequence, self._seats, self.max_length)

    def _extend(self, sequence: Sequence, step: Step) -> bool:
        """Gives a sequence a block for its next position; False where it lost those it had."""
        while not self._tables.extend(sequence, step):
            victim = self._running[-1]
            self._preempt(victim, step)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        """Takes all blocks from a sequence."""
        self._leave(self._running, sequence)
        self._seats -= self._seats_of(sequence)
        if self.config.preemption == "swap" and self._tables.swap_out(sequence, step):
            sequence.status = Status.SWAPPED
        else:
            self._tables.forget(sequence)
            sequence.status = Status.WAITING
        insort(self._waiting, sequence, key=self._place)
        step.preempted.append(sequence)
        sequence.request.metrics.preemptions += 1
        self.preemptions += 1

    def _admit(self, step: Step, budget: PrefillBudget, end: _Place | None = None) -> None:
        """Gives blocks to those who wait, in order, until one does not fit.

        Args:
            step: to compute their first tokens.
            budget: what the step has left for prompts.
            end: those behind this place are not admitted.
        """
        while budget.any and self._waiting:
            sequence = self._waiting[0]
            seats = self._seats_of(sequence)
            if (end is not None and self._places[sequence] > end) or sequence in step.preempted:
                break
            if self._seats + seats > self.config.max_num_seqs or not self._has_room(
                sequence, step, budget.tokens
            ):
                break
            del self._waiting[0]
            insort(self._running, sequence, key=self._place)
            self._seats += seats
            sequence.status = Status.RUNNING
            self._read(sequence, step, budget)

    def _has_room(self, sequence: Sequence, step: Step, left: int) -> bool:
        """Gives a sequence its blocks; who was refused is asked again when there is more than there was."""
        most = self.max_length if self.config.enable_chunked_prefill else left
        budget = self.blocks.free - self._seats
        if self._refused is not None:
            refused, room_then, most_then = self._refused
            if refused is sequence and budget <= room_then and most <= most_then:
                return False
        # Each running sequence will want a further block.
        admitted = self._tables.admit(sequence, step, self._seats, most)
        self._refused = None if admitted else (sequence, budget, most)
        return admitted

    def _seats_of(self, sequence: Sequence) -> int:
        """How many sequences it will become."""
        return sequence.params.num_sequences - len(sequence.request.sequences) + 1

    def _leave(self, queue: list[Sequence], sequence: Sequence) -> None:
        """Takes a sequence out of one of the two queues."""
        index = bisect_left(queue, self._places[sequence], key=self._place)
        assert queue[index] is sequence
        del queue[index]
