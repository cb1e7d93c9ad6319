"""Scheduler: chooses the sequences and tokens of every step. It handles numbers only, no tensors."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping
from collections.abc import Sequence as GenericSequence

from torch_armllm.engine.outputs import FinishReason
from torch_armllm.engine.request import Request, Sequence, Status
from torch_armllm.engine.scheduling.block_tables import BlockTables
from torch_armllm.engine.scheduling.chunk_budget import ChunkBudget, PrefillBudget
from torch_armllm.engine.scheduling.config import SchedulerConfig
from torch_armllm.engine.scheduling.policy import Policy, PriorityPolicy
from torch_armllm.engine.scheduling.step import Scheduled, Step
from torch_armllm.kv_cache.block_manager import BlockManager

__all__ = ["Scheduler", "SchedulerConfig"]

_RUNNING = Status.RUNNING

_SortKey = tuple[float, int, int]
"""Policy key, arrival number and index of a sequence; the smallest is served first."""


class Scheduler:
    """Continuous batching: each step decodes all running sequences, then fills up with prompt tokens.

    A sequence is admitted when there are blocks for its whole prompt, which are allocated together. Decoding
    allocates further blocks one at a time. When none is free, the running sequence that is last in the
    policy's order is preempted. A waiting sequence preempts running ones that come later in the policy's
    order, if that admits it.

    No block is moved twice in one step: sequences that are scheduled come before all that can still be
    preempted in the step, and a step in which decoding preempted a sequence admits none.

    In a pipeline several steps are under way, of different sequences but for chunks of one prompt, which need
    no token of the steps before. All processes compute the steps in order, so that a step may use blocks
    which the one before it still reads or writes.  No sequence is preempted before all steps have ended.

    Attributes:
        max_length: most tokens of a sequence: `max_model_len`, or the capacity of all blocks.
        preemptions: number of preemptions so far.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, policy: Policy | None = None) -> None:
        self.config = config
        self.blocks = blocks
        self.policy = policy if policy is not None else PriorityPolicy()
        self.max_length = min(config.max_model_len, blocks.num_blocks * blocks.block_size)
        self.preemptions = 0
        self._requests: dict[str, Request] = {}
        self._arrivals = 0
        self._keys: dict[Sequence, _SortKey] = {}
        self._key = self._keys.__getitem__
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._forked: list[Sequence] = []
        self._tables = BlockTables(blocks)
        self._states = self._tables.states
        self._under_way: set[Sequence] = set()
        self._unfilled: Step | None = None  # moves states, but computes nothing yet
        self._waits_for_steps = False
        self._slots = 0  # of max_num_seqs that are taken
        self._rejected: tuple[Sequence, int, int] | None = None
        self._preemption_futile: tuple[Sequence, int] | None = None
        max_step_time = config.max_step_time if config.enable_chunked_prefill else None
        self._chunk_budget = None if max_step_time is None else ChunkBudget(max_step_time)

    @property
    def has_unfinished(self) -> bool:
        """True if there is anything to compute."""
        return bool(self._requests)

    @property
    def running(self) -> int:
        """Number of sequences that hold blocks."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of sequences that were not admitted yet, or were preempted without swapping."""
        return len(self._waiting) - self.swapped

    @property
    def swapped(self) -> int:
        """Number of sequences whose blocks are in swap memory."""
        return len(self._tables.swapped)

    def call_on_leave(self, call: Callable[[GenericSequence[int], int], None]) -> None:
        """Has a function called for each sequence that gives its blocks back; see `BlockTables.on_leave`."""
        self._tables.on_leave = call

    @property
    def states_are_settled(self) -> bool:
        """True if no copies of states wait for the next step."""
        unfilled = self._unfilled
        waits = unfilled is not None and unfilled.state_moves
        return self._states is None or (self._states.settled and not waits)

    def check(self, request: Request) -> None:
        """Checks a request.

        Raises:
            ValueError: its id is in use, or it can never be served.
        """
        length, num_sequences = len(request.prompt_token_ids), request.params.num_sequences
        if request.request_id in self._requests:
            raise ValueError(
                f"request {request.request_id!r} is not finished: give the new one another request_id"
            )
        if length == 0:
            raise ValueError(f"request {request.request_id!r} has no prompt: give at least one token")
        if length >= self.max_length:
            limit = "max_model_len" if self.max_length == self.config.max_model_len else "the KV cache"
            raise ValueError(
                f"the prompt of request {request.request_id!r} has {length} tokens; {limit} allows "
                f"{self.max_length}, at least one output token included: shorten it"
                + ("" if limit == "max_model_len" else ", or give more kv_cache_memory")
            )
        if num_sequences > self.config.max_num_seqs:
            raise ValueError(
                f"request {request.request_id!r} wants {num_sequences} sequences; max_num_seqs is "
                f"{self.config.max_num_seqs}: request fewer, or raise it"
            )

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: its id is in use, or it can never be served.
        """
        self.check(request)
        (sequence,) = request.sequences
        self._requests[request.request_id] = request
        self._keys[sequence] = (self.policy.sort_key(request), self._arrivals, 0)
        self._arrivals += 1
        insort(self._waiting, sequence, key=self._key)

    def abort(self, request_id: str) -> Request | None:
        """Finishes all sequences of a request; returns None if no such request is unfinished."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        for sequence in request.sequences:
            if sequence.status is not Status.FINISHED:
                self.finish(sequence, "abort")
        return request

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Finishes a sequence and frees all that it holds."""
        assert sequence.status is not Status.FINISHED and sequence not in self._under_way
        if sequence.status is Status.RUNNING:
            self._remove(self._running, sequence)
            self._slots -= self._slots_of(sequence)
        else:
            self._remove(self._waiting, sequence)
        self._tables.free(sequence)
        sequence.status, sequence.finish_reason = Status.FINISHED, reason
        del self._keys[sequence]
        if self._rejected is not None and self._rejected[0] is sequence:
            self._rejected = None
        if self._preemption_futile is not None and self._preemption_futile[0] is sequence:
            self._preemption_futile = None
        if sequence.request.finished:
            del self._requests[sequence.request.request_id]

    def schedule(self) -> Step:
        """Returns the next step.

        It is empty only if there are no unfinished requests, or if other steps are under way.
        """
        step, self._unfilled = self._unfilled or Step(), None
        if self._waits_for_steps and self._under_way:
            self._unfilled = step
            return Step()
        self._waits_for_steps = False
        if self._states is not None:
            self._states.begin(step)
        if self._waiting and self._running:
            self._preempt_for_waiting(step)
        preempted = len(step.preempted)
        left, prefilling = self._schedule_decodes(step)
        if prefilling or self._waiting:
            budget = PrefillBudget(left)
            if self._chunk_budget is not None and step.scheduled:
                budget.work = self._chunk_budget.work()
            self._schedule_prefills(step, prefilling, budget, admit=len(step.preempted) == preempted)
            step.prefill_work = budget.used
        if not step.scheduled and self._requests:
            assert self._under_way
            self._unfilled = step
            return Step()
        return step

    def begin(self, step: Step) -> None:
        """Records that a pipeline has begun to compute a step.

        Its sequences take part in no other step until `complete`, but for those whose prompts are not
        computed to their ends.
        """
        for scheduled in step.scheduled:
            if scheduled.samples:
                self._under_way.add(scheduled.sequence)
            else:
                step.advanced.add(scheduled.sequence)
                self._tables.advance(scheduled.sequence, scheduled.start, scheduled.end, ())

    def forget_steps(self) -> None:
        """Forgets the steps that are under way: they do not end, and their requests can be aborted only."""
        self._under_way.clear()

    def fork(self, sequence: Sequence) -> list[Sequence]:
        """Creates the other sequences of a request when the current step completes its prompt."""
        request = sequence.request
        assert sequence.status is Status.RUNNING and len(request.sequences) == 1
        assert sequence.output_length == 0
        policy_key, arrival, _ = self._keys[sequence]
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
        if self._states is not None:
            self._states.fork(sequence, siblings)
        request.sequences += siblings
        for sibling in siblings:
            self._keys[sibling] = (policy_key, arrival, sibling.index)
            insort(self._running, sibling, key=self._key)
        self._forked += siblings
        return siblings

    def complete(self, step: Step, sampled: Mapping[Sequence, GenericSequence[int]]) -> None:
        """Records a computed step.

        Args:
            step: that was computed.
            sampled: new tokens of each sequence: its accepted draft tokens, and one more.
        """
        running, advance = _RUNNING, self._tables.advance
        advanced = step.advanced
        if self._under_way:
            self._under_way -= {scheduled.sequence for scheduled in step.scheduled} - advanced
        for sequence, start, count in step.scheduled:
            if sequence.status is running and not (advanced and sequence in advanced):
                advance(sequence, start, start + count, sampled.get(sequence, ()))
        for sequence in self._forked:
            if sequence.status is running:
                advance(sequence, sequence.computed, sequence.computed, sampled.get(sequence, ()))
        self._forked.clear()

    def record_time(self, step: Step, seconds: float) -> None:
        """Records the duration of a step, from which the budget of later prompt chunks is estimated."""
        if self._chunk_budget is not None:
            self._chunk_budget.record(step.prefill_work, seconds)

    def _schedule_decodes(self, step: Step) -> tuple[int, list[Sequence]]:
        """Schedules the next token, and the draft, of all sequences whose prompt is computed.

        Returns:
            The tokens that are left of `max_num_batched_tokens`, and the sequences that are in prefill.
        """
        prefilling = []
        decode_only = True
        size, left, states = self.blocks.block_size, self.config.max_num_batched_tokens, self._states
        spare = left - len(self._running)
        under_way, most = self._under_way, -(-len(self._running) // self.config.pipeline_stages)
        for sequence in self._running:  # preemption shortens this list at its end
            if under_way and sequence in under_way:
                continue
            start = sequence.computed
            if len(sequence.token_ids) - start > 1:
                prefilling.append(sequence)
                continue
            if len(step.scheduled) == most:
                continue
            ready = start % size and not self.blocks.is_shared(sequence.blocks[-1])
            if not ready and not self._extend(sequence, step):
                break
            count = 1
            if start < sequence.prompt_length:
                decode_only = False
            if sequence.draft:
                decode_only = False
                max_draft = min(spare, self.max_length - start - 1)
                num_draft = self._tables.fit_draft(sequence, step, max_draft, len(self._running))
                spare -= num_draft
                count += num_draft
                step.num_draft += num_draft
            if states is not None:
                states.save_decoded(sequence, step, start + count)
            step.scheduled.append(Scheduled(sequence, start, count))
            left -= count
        step.decode_only = decode_only
        return left, prefilling

    def _schedule_prefills(
        self, step: Step, prefilling: GenericSequence[Sequence], budget: PrefillBudget, admit: bool
    ) -> None:
        """Schedules prompt chunks of running and of newly admitted sequences, in the policy's order."""
        for sequence in prefilling:
            if admit and self._waiting:
                self._admit(step, budget, self._keys[sequence])
            self._schedule_chunk(sequence, step, budget)
        if admit and self._waiting:
            self._admit(step, budget)

    def _schedule_chunk(self, sequence: Sequence, step: Step, budget: PrefillBudget) -> None:
        """Schedules as much of a prompt as the budget allows."""
        if budget.any:
            pictures = sequence.request.pictures
            spans = () if pictures is None else pictures.spans
            count = budget.take(sequence.computed, len(sequence.token_ids) - sequence.computed, spans)
            if not count:
                return
            step.decode_only = False
            step.scheduled.append(Scheduled(sequence, sequence.computed, count))
            if self._states is not None:
                self._states.save_prompt(sequence, step, sequence.computed, sequence.computed + count)

    def _preempt_for_waiting(self, step: Step) -> None:
        """Preempts sequences with a larger policy key than the first waiting one, if that admits it."""
        first = self._waiting[0]
        policy_key, _, _ = self._keys[first]
        num_kept = bisect_right(self._running, policy_key, key=lambda sequence: self._keys[sequence][0])
        if num_kept == len(self._running) or self._preemption_futile == (first, num_kept):
            return
        kept = self._running[:num_kept]
        slots = sum(map(self._slots_of, kept))
        enough_slots = slots + self._slots_of(first) <= self.config.max_num_seqs
        if not (enough_slots and self._tables.fits_with(first, kept, slots)):
            self._preemption_futile = first, num_kept  # until one of the kept sequences is gone
            return
        if self._under_way:
            self._waits_for_steps = True
            return
        while not self._can_admit(first):
            assert len(self._running) > num_kept
            self._preempt(self._running[-1], step)
        self._rejected = None

    def _can_admit(self, sequence: Sequence) -> bool:
        """True if a waiting sequence could be admitted now."""
        enough_slots = self._slots + self._slots_of(sequence) <= self.config.max_num_seqs
        return enough_slots and self._tables.fits(sequence, self._slots, self.max_length)

    def _extend(self, sequence: Sequence, step: Step) -> bool:
        """Allocates a block for the next position; False if the sequence itself was preempted, or waits."""
        while not self._tables.extend(sequence, step):
            if self._under_way:
                self._waits_for_steps = True
                return False
            victim = self._running[-1]
            self._preempt(victim, step)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        """Moves a running sequence back to the waiting ones and frees its blocks."""
        self._remove(self._running, sequence)
        self._slots -= self._slots_of(sequence)
        if self.config.preemption == "swap" and self._tables.swap_out(sequence, step):
            sequence.status = Status.SWAPPED
        else:
            self._tables.free(sequence)
            sequence.status = Status.WAITING
        insort(self._waiting, sequence, key=self._key)
        step.preempted.append(sequence)
        sequence.request.metrics.preemptions += 1
        self.preemptions += 1

    def _admit(self, step: Step, budget: PrefillBudget, before: _SortKey | None = None) -> None:
        """Admits waiting sequences in order, until one does not fit.

        Args:
            step: computes their first chunks.
            budget: room that the step has left for prompts.
            before: stops at sequences after this key.
        """
        while budget.any and self._waiting:
            sequence = self._waiting[0]
            slots = self._slots_of(sequence)
            if (before is not None and self._keys[sequence] > before) or sequence in step.preempted:
                break
            if self._slots + slots > self.config.max_num_seqs or not self._allocate(
                sequence, step, budget.tokens
            ):
                break
            del self._waiting[0]
            insort(self._running, sequence, key=self._key)
            self._slots += slots
            sequence.status = Status.RUNNING
            self._schedule_chunk(sequence, step, budget)

    def _allocate(self, sequence: Sequence, step: Step, tokens_left: int) -> bool:
        """Allocates the blocks of a waiting sequence.

        A rejected sequence is not tried again before more blocks or tokens are left than at its rejection.
        """
        max_uncomputed = self.max_length if self.config.enable_chunked_prefill else tokens_left
        available = self.blocks.free - self._slots  # each running sequence will need another block
        if self._rejected is not None:
            rejected, available_then, max_uncomputed_then = self._rejected
            if rejected is sequence and available <= available_then and max_uncomputed <= max_uncomputed_then:
                return False
        admitted = self._tables.admit(sequence, step, self._slots, max_uncomputed)
        self._rejected = None if admitted else (sequence, available, max_uncomputed)
        return admitted

    def _slots_of(self, sequence: Sequence) -> int:
        """Slots of `max_num_seqs` that a sequence takes: one, or all of its request before `fork`."""
        return sequence.params.num_sequences - len(sequence.request.sequences) + 1

    def _remove(self, queue: list[Sequence], sequence: Sequence) -> None:
        """Removes a sequence from a sorted queue: waiting or running."""
        index = bisect_left(queue, self._keys[sequence], key=self._key)
        assert queue[index] is sequence
        del queue[index]
